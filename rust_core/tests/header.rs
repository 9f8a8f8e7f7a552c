//! `include/bagua_rust.h` is written by hand; this keeps it in step with `src/ffi.rs` and
//! `src/error.rs`: the same functions with the same number of parameters, the same codes.
//! (That the types agree is checked by `static_assert`s in `csrc/bindings/order.cc` and by
//! `src/abi_types.rs`.)

const HEADER: &str = include_str!("../include/bagua_rust.h");
const FFI: &str = include_str!("../src/ffi.rs");
const ERROR: &str = include_str!("../src/error.rs");

/// Name and parameter names of each function that starts with `prefix` in `source`.
fn functions(source: &str, prefix: &str, name_of_parameter: fn(&str) -> &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for rest in source.split(prefix).skip(1) {
        let (name, rest) = rest.split_once('(').unwrap();
        let (parameters, _) = rest.split_once(')').unwrap();
        let names = parameters.split(',').map(str::trim).filter(|parameter| !parameter.is_empty());
        found.push((
            name.to_string(),
            names.map(|parameter| name_of_parameter(parameter).to_string()).collect(),
        ));
    }
    found
}

#[test]
fn functions_agree() {
    let in_header = functions(HEADER, "\nint32_t ", |parameter| parameter.rsplit(' ').next().unwrap());
    let in_ffi =
        functions(FFI, "pub unsafe extern \"C\" fn ", |parameter| parameter.split(':').next().unwrap());
    assert!(in_ffi.len() >= 12, "the search finds nothing any more: {in_ffi:?}");
    assert_eq!(in_header, in_ffi);
}

/// `(name, number)` of the lines `NAME = number,` between `start` and the next `}`.
fn codes(source: &str, start: &str) -> Vec<(String, i32)> {
    let (_, rest) = source.split_once(start).unwrap();
    let (body, _) = rest.split_once('}').unwrap();
    let lines = body.lines().filter_map(|line| line.trim().split_once(" = "));
    lines
        .map(|(name, rest)| {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            let name = name.trim_start_matches("BAGUA_RUST_").replace('_', "").to_lowercase();
            (name, digits.parse().unwrap())
        })
        .collect()
}

#[test]
fn codes_agree() {
    let in_header = codes(HEADER, "typedef enum BaguaRustCode {");
    let mut in_rust = vec![("ok".to_string(), 0)];
    in_rust.extend(codes(ERROR, "pub enum ErrorCode {"));
    assert!(in_rust.len() >= 13, "the search finds nothing any more: {in_rust:?}");
    assert_eq!(in_header, in_rust);
}
