//! `include/bagua_rust.h` is written by hand; this keeps it in step with `src/ffi.rs` and
//! `src/error.rs`: the same functions with the same parameters, the same codes, decisions and
//! outcomes. (That the types agree is checked by `static_assert`s in `csrc/bindings/order.cc`,
//! `topology.cc` and `simulator.cc`, and by `src/ffi.rs`.)

const HEADER: &str = include_str!("../include/bagua_rust.h");
const FFI: &str = include_str!("../src/ffi.rs");
const ERROR: &str = include_str!("../src/error.rs");
const STEP: &str = include_str!("../src/step.rs");

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
    let mut in_ffi = functions(FFI, "\n    fn bagua", |parameter| parameter.split(':').next().unwrap());
    for (name, parameters) in &mut in_ffi {
        name.insert_str(0, "bagua");
        parameters.push("error".to_string()); // `export!` does
    }
    assert!(in_ffi.len() >= 18, "the search finds nothing any more: {in_ffi:?}");
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
            let name = name.trim_start_matches("BAGUA_").trim_start_matches("RUST_");
            let name = name.replace('_', "").to_lowercase();
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

#[test]
fn outcomes_agree() {
    let in_rust = codes(STEP, "pub enum Outcome {");
    assert_eq!(in_rust.len(), 3, "the search finds nothing any more: {in_rust:?}");
    assert_eq!(codes(HEADER, "typedef enum BaguaOutcome {"), in_rust);
}

/// The numbers that `bagua_step_next` writes are those of the header, under the same names.
#[test]
fn decisions_agree() {
    let (_, rest) = FFI.split_once(".next_decision() {").unwrap();
    let (arms, _) = rest.split_once('}').unwrap();
    let in_ffi: Vec<(String, i32)> = arms
        .lines()
        .filter_map(|line| line.trim().split_once(" => ("))
        .map(|(pattern, number)| {
            let name = pattern.trim_start_matches("Some(Decision::").split(['(', ')']).next().unwrap();
            let name = name.replace("None", "Nothing").to_lowercase();
            (name, number.split(',').next().unwrap().parse().unwrap())
        })
        .collect();
    assert_eq!(in_ffi.len(), 8, "the search finds nothing any more: {in_ffi:?}");
    assert_eq!(codes(HEADER, "typedef enum BaguaDecision {"), in_ffi);
}
