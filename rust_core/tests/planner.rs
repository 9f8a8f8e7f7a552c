//! The planner against an oracle in plain loops, and its invariants on random cases.
//!
//! The oracle is the definition of the layout: it has no open buckets, but examines everything placed
//! so far for each tensor. On a failure the seed of the case is printed.

mod random;

use bagua_rust::error::{Error, ErrorCode};
use bagua_rust::planner::{plan, BucketPlan, PlanOptions, TensorSpec};
use random::{random_case, Case, SplitMix64};

const NUM_CASES: u64 = 4000;

struct Bucket {
    key: u64,
    item_bytes: u32,
    numel: u64,
    members: Vec<Member>, // in the order in which they are expected to become ready
}

struct Member {
    tensor: usize,
    offset_numel: u64,
    numel: u64,
}

/// The plan, bucket by bucket. Bucket and item size are those of the first member.
fn buckets(planned: &BucketPlan, tensors: &[TensorSpec], order: &[u64]) -> Vec<Bucket> {
    let bucket = |(index, &numel): (usize, &u64)| {
        let ordered = order.iter().map(|&entry| entry as usize);
        let inside: Vec<usize> = ordered.filter(|&tensor| planned.bucket_of[tensor] == index).collect();
        let TensorSpec { key, item_bytes, .. } = tensors[inside[0]];
        let member = |tensor: usize| Member {
            tensor,
            offset_numel: planned.offset_numel_of[tensor],
            numel: tensors[tensor].numel,
        };
        Bucket { key, item_bytes, numel, members: inside.into_iter().map(member).collect() }
    };
    planned.bucket_numels.iter().enumerate().map(bucket).collect()
}

fn for_each_case(mut check: impl FnMut(&Case, &[Bucket], u64)) {
    for seed in 0..NUM_CASES {
        let case = random_case(&mut SplitMix64::new(seed));
        let planned = plan(&case.tensors, &case.order, case.options)
            .unwrap_or_else(|error| panic!("seed {seed}: {error} for {case:?}"));
        assert!(planned.bucket_of.iter().all(|&bucket| bucket < planned.bucket_numels.len()), "seed {seed}");
        check(&case, &buckets(&planned, &case.tensors, &case.order), seed);
    }
}

fn size_bytes(case: &Case, tensor: usize) -> u64 {
    let mut size = 0;
    while size < case.tensors[tensor].numel * u64::from(case.tensors[tensor].item_bytes) {
        size += case.options.align_bytes;
    }
    size
}

/// The buckets as lists of tensors, in launch order, found by examining everything placed so far.
fn oracle_buckets(case: &Case) -> Vec<Vec<usize>> {
    let mut buckets: Vec<(Vec<usize>, bool)> = Vec::new(); // tensors, is closed
    for &entry in &case.order {
        let tensor = entry as usize;
        let key = case.tensors[tensor].key;
        // The cap of the bucket that `first` opened: the bytes of its key before it, or half of the
        // others, whichever is smaller, within the two limits.
        let cap = |first: usize| {
            let small = case.options.small_bucket_bytes.min(case.options.bucket_bytes);
            let (mut before, mut from_it, mut is_reached) = (0, 0, false);
            for &entry in &case.order {
                is_reached |= entry as usize == first;
                if case.tensors[entry as usize].key == key {
                    let part = if is_reached { &mut from_it } else { &mut before };
                    *part += size_bytes(case, entry as usize);
                }
            }
            small.max(case.options.bucket_bytes.min(before.min(from_it / 2)))
        };
        let total = |tensors: &[usize]| tensors.iter().map(|&member| size_bytes(case, member)).sum::<u64>();
        let open = buckets.iter().position(|bucket| !bucket.1 && case.tensors[bucket.0[0]].key == key);
        let index = match open {
            Some(index)
                if total(&buckets[index].0) + size_bytes(case, tensor) <= cap(buckets[index].0[0]) =>
            {
                buckets[index].0.push(tensor);
                index
            }
            other => {
                if let Some(index) = other {
                    buckets[index].1 = true;
                }
                buckets.push((vec![tensor], false));
                buckets.len() - 1
            }
        };
        buckets[index].1 = total(&buckets[index].0) > cap(buckets[index].0[0]);
    }
    let mut launch: Vec<Vec<usize>> = Vec::new();
    for &entry in &case.order {
        let complete = buckets.iter().find(|bucket| bucket.0.last() == Some(&(entry as usize)));
        launch.extend(complete.map(|bucket| bucket.0.clone()));
    }
    launch
}

#[test]
fn layout_equals_the_oracle() {
    for_each_case(|case, planned, seed| {
        let expected = oracle_buckets(case);
        let tensors: Vec<Vec<usize>> = planned
            .iter()
            .map(|bucket| bucket.members.iter().map(|member| member.tensor).collect())
            .collect();
        assert_eq!(tensors, expected, "seed {seed}");
        for bucket in planned {
            let mut offset_bytes = 0;
            for member in &bucket.members {
                let spec = case.tensors[member.tensor];
                assert_eq!(member.offset_numel * u64::from(spec.item_bytes), offset_bytes, "seed {seed}");
                assert_eq!(member.numel, spec.numel, "seed {seed}");
                offset_bytes += size_bytes(case, member.tensor);
            }
            assert_eq!(bucket.numel * u64::from(bucket.item_bytes), offset_bytes, "seed {seed}");
        }
    });
}

#[test]
fn every_tensor_is_placed_once_with_its_own_kind_and_apart_from_others() {
    for_each_case(|case, planned, seed| {
        let mut num_buckets_of = vec![0; case.tensors.len()];
        for bucket in planned {
            assert!(!bucket.members.is_empty(), "seed {seed}");
            let mut end = 0;
            for &Member { tensor, offset_numel, numel } in &bucket.members {
                num_buckets_of[tensor] += 1;
                let spec = case.tensors[tensor];
                assert_eq!((spec.key, spec.item_bytes), (bucket.key, bucket.item_bytes), "seed {seed}");
                assert!(offset_numel >= end, "seed {seed}: tensor {tensor} overlaps the one before it");
                assert_eq!(
                    offset_numel * u64::from(bucket.item_bytes) % case.options.align_bytes,
                    0,
                    "seed {seed}"
                );
                end = offset_numel + numel;
            }
            assert!(end <= bucket.numel, "seed {seed}");
            assert_eq!(
                bucket.numel * u64::from(bucket.item_bytes) % case.options.align_bytes,
                0,
                "seed {seed}"
            );
        }
        assert!(num_buckets_of.iter().all(|&count| count == 1), "seed {seed}: {num_buckets_of:?}");
    });
}

/// No bucket of several members passes `bucket_bytes`, and none closes early: the next tensor of its
/// key would have taken it past the small cap. The last one of a key is small, or a single tensor.
#[test]
fn caps_are_respected_and_used() {
    for_each_case(|case, planned, seed| {
        let cap = case.options.bucket_bytes;
        let small_cap = case.options.small_bucket_bytes.min(cap);
        let position = |tensor: usize| case.order.iter().position(|&entry| entry as usize == tensor);
        for (index, bucket) in planned.iter().enumerate() {
            let total = bucket.numel * u64::from(bucket.item_bytes);
            assert!(
                total <= cap || bucket.members.len() == 1,
                "seed {seed}: bucket {index} has {total} bytes"
            );
            let last = bucket.members.last().and_then(|member| position(member.tensor));
            let next = case.order[last.unwrap() + 1..]
                .iter()
                .find(|&&entry| case.tensors[entry as usize].key == bucket.key);
            if let Some(&next) = next {
                let grown = total + size_bytes(case, next as usize);
                assert!(grown > small_cap, "seed {seed}: bucket {index} closed early");
            } else {
                assert!(
                    total <= small_cap || bucket.members.len() == 1,
                    "seed {seed}: bucket {index}, the last of its key, has {total} bytes"
                );
            }
        }
    });
}

#[test]
fn launch_order_follows_the_last_members() {
    for_each_case(|case, planned, seed| {
        let position = |tensor: usize| case.order.iter().position(|&entry| entry as usize == tensor).unwrap();
        let mut previous = None;
        for bucket in planned {
            let positions: Vec<usize> = bucket.members.iter().map(|member| position(member.tensor)).collect();
            assert!(positions.windows(2).all(|pair| pair[0] < pair[1]), "seed {seed}: {positions:?}");
            assert!(previous < positions.last().copied(), "seed {seed}");
            previous = positions.last().copied();
        }
    });
}

#[test]
fn the_plan_is_a_function_of_its_arguments() {
    for seed in 0..100 {
        let case = random_case(&mut SplitMix64::new(seed));
        let planned = || plan(&case.tensors, &case.order, case.options).unwrap();
        assert_eq!(planned(), planned(), "seed {seed}");
    }
}

fn options(small_bucket_bytes: u64, bucket_bytes: u64, align_bytes: u64) -> PlanOptions {
    PlanOptions { small_bucket_bytes, bucket_bytes, align_bytes }
}

fn spec(numel: u64, item_bytes: u32, key: u64) -> TensorSpec {
    TensorSpec { numel, item_bytes, key }
}

#[test]
fn edge_cases_are_planned() {
    assert_eq!(plan(&[], &[], options(1, 1, 1)).map(|planned| planned.bucket_numels), Ok(vec![]));

    let empty_only = plan(&[spec(0, 4, 0), spec(0, 4, 0)], &[1, 0], options(8, 8, 8)).unwrap();
    assert_eq!((empty_only.bucket_of, empty_only.bucket_numels), (vec![0, 0], vec![0]));

    // Exactly full is not past the cap; a tensor without elements still fits, one element does not.
    let full =
        plan(&[spec(16, 4, 0), spec(0, 4, 0), spec(1, 4, 0)], &[0, 1, 2], options(64, 64, 64)).unwrap();
    assert_eq!((full.bucket_of, full.offset_numel_of), (vec![0, 0, 1], vec![0, 16, 0]));

    // The largest sizes that fit in 64 bits; their sum does not, so they are kept apart.
    let huge = 1 << 63;
    let apart = plan(&[spec(huge, 1, 0), spec(huge, 1, 0)], &[0, 1], options(u64::MAX, u64::MAX, 1)).unwrap();
    assert_eq!((apart.bucket_of, apart.bucket_numels), (vec![0, 1], vec![huge, huge]));
}

#[test]
fn bad_arguments_are_errors_that_name_the_value() {
    let two = [spec(4, 4, 0), spec(4, 4, 0)];
    let good = options(64, 64, 64);
    let cases: Vec<(Result<BucketPlan, Error>, ErrorCode, &str)> = vec![
        (plan(&two, &[0], good), ErrorCode::InvalidOrder, "order has 1 entries; expected 2"),
        (plan(&two, &[0, 1, 1], good), ErrorCode::InvalidOrder, "order has 3 entries; expected 2"),
        (plan(&two, &[0, 2], good), ErrorCode::InvalidOrder, "order[1] is 2; expected an index below 2"),
        (plan(&two, &[u64::MAX, 0], good), ErrorCode::InvalidOrder, "order[0] is 18446744073709551615"),
        (plan(&two, &[1, 1], good), ErrorCode::InvalidOrder, "order[1] is 1, which occurs earlier"),
        (plan(&two, &[0, 1], options(64, 64, 0)), ErrorCode::InvalidAlignment, "align_bytes is 0"),
        (plan(&two, &[0, 1], options(64, 64, 48)), ErrorCode::InvalidAlignment, "align_bytes is 48"),
        (
            plan(&two, &[0, 1], options(64, 64, 2)),
            ErrorCode::InvalidAlignment,
            "tensor 0 has items of 4 bytes",
        ),
        (plan(&[spec(4, 12, 0)], &[0], good), ErrorCode::InvalidAlignment, "tensor 0 has items of 12 bytes"),
        (plan(&two, &[0, 1], options(0, 64, 64)), ErrorCode::InvalidBucketBytes, "small_bucket_bytes is 0"),
        (plan(&two, &[0, 1], options(64, 0, 64)), ErrorCode::InvalidBucketBytes, "bucket_bytes is 0"),
        (plan(&[], &[], options(64, 0, 64)), ErrorCode::InvalidBucketBytes, "bucket_bytes is 0"),
        (plan(&[spec(4, 0, 0)], &[0], good), ErrorCode::InvalidItemBytes, "item_bytes of tensor 0 is 0"),
        (
            plan(&[spec(4, 4, 9), spec(4, 2, 9)], &[0, 1], good),
            ErrorCode::InvalidItemBytes,
            "key 9 has items of 4",
        ),
        (
            plan(&[spec(1 << 62, 4, 0)], &[0], good),
            ErrorCode::Overflow,
            "tensor 0 has 4611686018427387904 elements",
        ),
        (
            plan(&[spec(u64::MAX - 62, 1, 0)], &[0], good),
            ErrorCode::Overflow,
            "expected a padded size below 2^64",
        ),
    ];
    for (outcome, code, text) in cases {
        let error = outcome.expect_err(text);
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(text), "{error:?} says {error}, expected {text}");
    }
}
