//! The C ABI as C uses it: round trips against the Rust types, null pointers, short arrays, codes
//! and messages, and agreement of `include/bagua_rust.h` with `src/ffi.rs`.
//!
//! Panics and the cutting of messages are tested beside their code, in `src/ffi.rs` and
//! `src/abi_types.rs`, because no argument makes the library panic.

use bagua_rust::abi_types::*;
use bagua_rust::error::ErrorCode;
use bagua_rust::ffi::*;
use bagua_rust::topology::TOPOLOGIES;
use std::ptr::{null, null_mut};

const OPTIONS: BaguaPlanOptions =
    BaguaPlanOptions { small_bucket_bytes: 128, bucket_bytes: 128, align_bytes: 64 };
const NUM_TENSORS: u64 = 5;
const ORDER: [u64; 5] = [4, 3, 2, 1, 0];

fn specs() -> Vec<BaguaTensorSpec> {
    (0..NUM_TENSORS)
        .map(|tensor| BaguaTensorSpec { numel: 10 + tensor, key: tensor % 2, item_bytes: 4 })
        .collect()
}

fn no_error() -> BaguaRustError {
    BaguaRustError::new(-1, "not written")
}

/// Asserts on the status, and that it is also the code; returns the message.
fn expect(code: ErrorCode, status: i32, error: &BaguaRustError) -> String {
    assert_eq!((status, error.code), (code as i32, code as i32), "{}", error.text());
    error.text()
}

fn expect_ok(status: i32, error: &BaguaRustError) {
    assert_eq!((status, error.code, error.text()), (0, 0, String::new()));
}

struct Handles {
    plan: *mut BaguaPlan,
    scheduler: *mut BaguaScheduler,
}

impl Handles {
    fn new() -> Self {
        let (mut plan, mut scheduler, mut error) = (null_mut(), null_mut(), no_error());
        let specs = specs();
        // SAFETY: valid pointers, and lengths that are those of the arrays.
        unsafe {
            let status = bagua_plan_new(
                specs.as_ptr(),
                NUM_TENSORS,
                ORDER.as_ptr(),
                NUM_TENSORS,
                &OPTIONS,
                &mut plan,
                &mut error,
            );
            expect_ok(status, &error);
            expect_ok(bagua_scheduler_new(plan, &mut scheduler, &mut error), &error);
        }
        Handles { plan, scheduler }
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        let mut error = no_error();
        // SAFETY: handles from `new`, freed once; the plan first, which the scheduler must survive.
        unsafe {
            expect_ok(bagua_plan_free(self.plan, &mut error), &error);
            expect_ok(bagua_scheduler_begin_step(self.scheduler, &mut error), &error);
            expect_ok(bagua_scheduler_free(self.scheduler, &mut error), &error);
        }
    }
}

#[test]
fn a_plan_crosses_the_boundary_unchanged() {
    use bagua_rust::planner::{plan, PlanOptions, TensorSpec};
    let specs: Vec<TensorSpec> = specs().iter().map(TensorSpec::from).collect();
    let expected = plan(&specs, &ORDER, PlanOptions::from(&OPTIONS)).unwrap();

    let (handles, mut error, mut num_buckets) = (Handles::new(), no_error(), 0);
    // SAFETY: live handles, valid pointers, capacities that are the arrays' lengths.
    unsafe {
        expect_ok(bagua_plan_num_buckets(handles.plan, &mut num_buckets, &mut error), &error);
        assert_eq!(num_buckets as usize, expected.buckets().len());
        for (index, bucket) in expected.buckets().iter().enumerate() {
            let mut info = BaguaBucketInfo::default();
            expect_ok(bagua_plan_bucket(handles.plan, index as u64, &mut info, &mut error), &error);
            assert_eq!(info, BaguaBucketInfo::from(bucket));

            let mut members = vec![BaguaBucketMember::default(); info.num_members as usize + 1];
            let (pointer, capacity) = (members.as_mut_ptr(), members.len() as u64);
            let status = bagua_plan_bucket_members(handles.plan, index as u64, pointer, capacity, &mut error);
            expect_ok(status, &error);
            let mut expected_members: Vec<_> = bucket.members.iter().map(BaguaBucketMember::from).collect();
            expected_members.push(BaguaBucketMember::default()); // the spare entry is not touched
            assert_eq!(members, expected_members);
        }
    }
}

#[test]
fn a_step_crosses_the_boundary_unchanged() {
    let (handles, mut error) = (Handles::new(), no_error());
    let (mut range, mut tensors, mut num) = (BaguaBucketRange::default(), [99; 5], 0);
    // SAFETY: live handles, valid pointers, capacities that are the array's length.
    unsafe {
        expect_ok(bagua_scheduler_begin_step(handles.scheduler, &mut error), &error);
        // The plan is [4, 2], [3, 1], [0].
        for (tensor, first, last) in [(4, 0, 0), (2, 0, 1), (1, 1, 1)] {
            let status = bagua_scheduler_mark_ready(handles.scheduler, tensor, &mut range, &mut error);
            expect_ok(status, &error);
            assert_eq!(range, BaguaBucketRange { first, last });
        }
        expect_ok(
            bagua_scheduler_missing(handles.scheduler, tensors.as_mut_ptr(), 5, &mut num, &mut error),
            &error,
        );
        assert_eq!((num, tensors), (2, [0, 3, 99, 99, 99]));
        expect_ok(bagua_scheduler_finish(handles.scheduler, &mut range, &mut error), &error);
        assert_eq!(range, BaguaBucketRange { first: 1, last: 3 });
        expect_ok(
            bagua_scheduler_observed_order(handles.scheduler, tensors.as_mut_ptr(), 5, &mut error),
            &error,
        );
        assert_eq!(tensors, [4, 2, 1, 3, 0]);
    }
}

#[test]
fn misuse_of_a_step_has_its_own_codes() {
    let (handles, mut error, mut range) =
        (Handles::new(), no_error(), BaguaBucketRange { first: 7, last: 7 });
    // SAFETY: live handles and valid pointers.
    unsafe {
        let status = bagua_scheduler_mark_ready(handles.scheduler, 0, &mut range, &mut error);
        expect(ErrorCode::StepNotStarted, status, &error);
        let status = bagua_scheduler_finish(handles.scheduler, &mut range, &mut error);
        expect(ErrorCode::StepNotStarted, status, &error);
        bagua_scheduler_begin_step(handles.scheduler, &mut error);
        let status = bagua_scheduler_mark_ready(handles.scheduler, 5, &mut range, &mut error);
        let text = expect(ErrorCode::TensorOutOfRange, status, &error);
        assert_eq!(text, "tensor index is 5; expected below 5; pass an index into the list that was planned");
        assert_eq!(range, BaguaBucketRange { first: 7, last: 7 }, "no output on an error");
        bagua_scheduler_mark_ready(handles.scheduler, 2, &mut range, &mut error);
        let status = bagua_scheduler_mark_ready(handles.scheduler, 2, &mut range, &mut error);
        expect(ErrorCode::AlreadyReady, status, &error);
        let mut info = BaguaBucketInfo::default();
        let status = bagua_plan_bucket(handles.plan, 9, &mut info, &mut error);
        expect(ErrorCode::BucketOutOfRange, status, &error);
    }
}

#[test]
fn short_arrays_are_refused_and_the_size_needed_is_told() {
    let (handles, mut error, mut num) = (Handles::new(), no_error(), 0);
    let mut tensors = [99; 5];
    let mut members = [BaguaBucketMember::default(); 1];
    // SAFETY: live handles, valid pointers, capacities within the arrays' lengths.
    unsafe {
        let status =
            bagua_scheduler_missing(handles.scheduler, tensors.as_mut_ptr(), 4, &mut num, &mut error);
        expect(ErrorCode::BufferTooSmall, status, &error);
        assert_eq!(num, NUM_TENSORS);
        let status = bagua_scheduler_missing(handles.scheduler, null_mut(), 0, &mut num, &mut error);
        expect(ErrorCode::BufferTooSmall, status, &error);
        let status = bagua_scheduler_observed_order(handles.scheduler, tensors.as_mut_ptr(), 4, &mut error);
        let text = expect(ErrorCode::BufferTooSmall, status, &error);
        assert!(text.starts_with("out_tensors has room for 4 entries; expected at least 5"), "{text}");
        let status = bagua_plan_bucket_members(handles.plan, 0, members.as_mut_ptr(), 0, &mut error);
        expect(ErrorCode::BufferTooSmall, status, &error);
    }
    assert_eq!(tensors, [99; 5]);
}

/// Every pointer of every function, one at a time.
#[test]
#[rustfmt::skip] // a table
fn null_pointers_are_refused() {
    let handles = Handles::new();
    let (plan, scheduler, specs, order) = (handles.plan, handles.scheduler, specs(), ORDER.as_ptr());
    let (mut no_plan, mut no_scheduler, mut num) = (null_mut(), null_mut(), 0);
    let (mut info, mut range, mut tensors) = (BaguaBucketInfo::default(), BaguaBucketRange::default(), [0; 5]);
    let mut member = [BaguaBucketMember::default(); 5];
    let mut neighbor = [BaguaNeighbor::default(); 4];
    let neighbors = neighbor.as_mut_ptr();
    let (members, out, mut error) = (member.as_mut_ptr(), tensors.as_mut_ptr(), no_error());
    let e: *mut BaguaRustError = &mut error;
    // SAFETY: pointers are live and valid, or null, which is the subject.
    let statuses = unsafe {
        bagua_scheduler_begin_step(scheduler, e);
        [
            ("tensors", bagua_plan_new(null(), 5, order, 5, &OPTIONS, &mut no_plan, e), (*e).text()),
            ("order", bagua_plan_new(specs.as_ptr(), 5, null(), 5, &OPTIONS, &mut no_plan, e), (*e).text()),
            ("options", bagua_plan_new(specs.as_ptr(), 5, order, 5, null(), &mut no_plan, e), (*e).text()),
            ("out_plan", bagua_plan_new(specs.as_ptr(), 5, order, 5, &OPTIONS, null_mut(), e), (*e).text()),
            ("plan", bagua_plan_free(null_mut(), e), (*e).text()),
            ("plan", bagua_plan_num_buckets(null(), &mut num, e), (*e).text()),
            ("out_num_buckets", bagua_plan_num_buckets(plan, null_mut(), e), (*e).text()),
            ("plan", bagua_plan_bucket(null(), 0, &mut info, e), (*e).text()),
            ("out_info", bagua_plan_bucket(plan, 0, null_mut(), e), (*e).text()),
            ("plan", bagua_plan_bucket_members(null(), 0, members, 5, e), (*e).text()),
            ("out_members", bagua_plan_bucket_members(plan, 0, null_mut(), 5, e), (*e).text()),
            ("plan", bagua_scheduler_new(null(), &mut no_scheduler, e), (*e).text()),
            ("out_scheduler", bagua_scheduler_new(plan, null_mut(), e), (*e).text()),
            ("scheduler", bagua_scheduler_free(null_mut(), e), (*e).text()),
            ("scheduler", bagua_scheduler_begin_step(null_mut(), e), (*e).text()),
            ("scheduler", bagua_scheduler_mark_ready(null_mut(), 0, &mut range, e), (*e).text()),
            ("out_range", bagua_scheduler_mark_ready(scheduler, 0, null_mut(), e), (*e).text()),
            ("scheduler", bagua_scheduler_finish(null_mut(), &mut range, e), (*e).text()),
            ("out_range", bagua_scheduler_finish(scheduler, null_mut(), e), (*e).text()),
            ("scheduler", bagua_scheduler_missing(null(), out, 5, &mut num, e), (*e).text()),
            ("out_tensors", bagua_scheduler_missing(scheduler, null_mut(), 5, &mut num, e), (*e).text()),
            ("out_num", bagua_scheduler_missing(scheduler, out, 5, null_mut(), e), (*e).text()),
            ("scheduler", bagua_scheduler_observed_order(null(), out, 5, e), (*e).text()),
            ("out_tensors", bagua_scheduler_observed_order(scheduler, null_mut(), 5, e), (*e).text()),
            ("out_name", bagua_topology_name(0, null_mut(), 32, e), (*e).text()),
            ("out_neighbors", bagua_topology_neighbors(0, 4, 1, 0, null_mut(), 4, &mut num, e), (*e).text()),
            ("out_num", bagua_topology_neighbors(0, 4, 1, 0, neighbors, 4, null_mut(), e), (*e).text()),
        ]
    };
    for (argument, status, text) in statuses {
        assert_eq!(status, ErrorCode::NullPointer as i32, "{argument}: {text}");
        assert!(text.starts_with(&format!("{argument} is null")), "{argument}: {text}");
    }
    assert!(no_plan.is_null() && no_scheduler.is_null());
    // The refused calls above changed nothing: tensor 0 can still be marked, the step still finished.
    // SAFETY: as above.
    unsafe {
        assert_eq!(bagua_scheduler_mark_ready(scheduler, 0, &mut range, e), 0);
        assert_eq!(bagua_scheduler_finish(scheduler, &mut range, e), 0);
    }
}

#[test]
#[rustfmt::skip] // a table
fn a_null_error_is_refused_by_every_function() {
    let handles = Handles::new();
    let (plan, scheduler, specs, order) = (handles.plan, handles.scheduler, specs(), ORDER.as_ptr());
    let (mut no_plan, mut no_scheduler, mut num) = (null_mut(), null_mut(), 0);
    let (mut info, mut range, mut tensors) = (BaguaBucketInfo::default(), BaguaBucketRange::default(), [0; 5]);
    let mut members = [BaguaBucketMember::default(); 5];
    let (mut name, mut neighbors) = ([0; 32], [BaguaNeighbor::default(); 4]);
    // SAFETY: pointers are live and valid, but for the null error; `free` must not free.
    let statuses = unsafe {
        [
            bagua_plan_new(specs.as_ptr(), 5, order, 5, &OPTIONS, &mut no_plan, null_mut()),
            bagua_plan_free(plan, null_mut()),
            bagua_plan_num_buckets(plan, &mut num, null_mut()),
            bagua_plan_bucket(plan, 0, &mut info, null_mut()),
            bagua_plan_bucket_members(plan, 0, members.as_mut_ptr(), 5, null_mut()),
            bagua_scheduler_new(plan, &mut no_scheduler, null_mut()),
            bagua_scheduler_free(scheduler, null_mut()),
            bagua_scheduler_begin_step(scheduler, null_mut()),
            bagua_scheduler_mark_ready(scheduler, 0, &mut range, null_mut()),
            bagua_scheduler_finish(scheduler, &mut range, null_mut()),
            bagua_scheduler_missing(scheduler, tensors.as_mut_ptr(), 5, &mut num, null_mut()),
            bagua_scheduler_observed_order(scheduler, tensors.as_mut_ptr(), 5, null_mut()),
            bagua_topology_name(0, name.as_mut_ptr(), 32, null_mut()),
            bagua_topology_neighbors(0, 4, 1, 0, neighbors.as_mut_ptr(), 4, &mut num, null_mut()),
        ]
    };
    assert_eq!(statuses, [ErrorCode::NullPointer as i32; 14]);
    assert!(no_plan.is_null() && no_scheduler.is_null());
}

#[test]
fn no_tensors_need_no_arrays_and_impossible_lengths_are_refused() {
    let (mut plan, mut scheduler, mut num, mut error) = (null_mut(), null_mut(), 9, no_error());
    let specs = specs();
    // SAFETY: null arrays have length 0; the impossible length is refused before the array is read.
    unsafe {
        expect_ok(bagua_plan_new(null(), 0, null(), 0, &OPTIONS, &mut plan, &mut error), &error);
        expect_ok(bagua_scheduler_new(plan, &mut scheduler, &mut error), &error);
        expect_ok(bagua_scheduler_missing(scheduler, null_mut(), 0, &mut num, &mut error), &error);
        assert_eq!(num, 0);
        expect_ok(bagua_scheduler_observed_order(scheduler, null_mut(), 0, &mut error), &error);
        expect_ok(bagua_scheduler_free(scheduler, &mut error), &error);
        expect_ok(bagua_plan_free(plan, &mut error), &error);
        let status =
            bagua_plan_new(specs.as_ptr(), u64::MAX, ORDER.as_ptr(), 5, &OPTIONS, &mut plan, &mut error);
        expect(ErrorCode::Overflow, status, &error);
    }
}

#[test]
fn neighbourhoods_cross_the_boundary_unchanged() {
    let (mut error, mut num, mut name) = (no_error(), 0, [0; 32]);
    let mut neighbors = [BaguaNeighbor::default(); 6];
    for (index, topology) in TOPOLOGIES.iter().enumerate() {
        // SAFETY: valid pointers, capacities are the arrays' lengths.
        unsafe {
            expect_ok(bagua_topology_name(index as u32, name.as_mut_ptr(), 32, &mut error), &error);
            let (out, out_num) = (neighbors.as_mut_ptr(), &mut num);
            expect_ok(bagua_topology_neighbors(index as u32, 6, 4, 7, out, 6, out_num, &mut error), &error);
        }
        let nul = name.iter().position(|&byte| byte == 0).unwrap();
        assert_eq!(&name[..nul], topology.name().as_bytes());
        let expected: Vec<BaguaNeighbor> =
            topology.neighbors(6, 4, 7).unwrap().iter().map(BaguaNeighbor::from).collect();
        assert_eq!(&neighbors[..num as usize], expected);
    }
}

#[test]
fn misuse_of_topologies_has_its_own_codes() {
    let (mut error, mut num, mut name) = (no_error(), 0u64, [0; 3]);
    let mut neighbors = [BaguaNeighbor::default(); 2];
    let unknown = TOPOLOGIES.len() as u32;
    // SAFETY: valid pointers, capacities within the arrays' lengths.
    unsafe {
        let status = bagua_topology_name(unknown, name.as_mut_ptr(), 3, &mut error);
        expect(ErrorCode::TopologyOutOfRange, status, &error);
        let status = bagua_topology_name(0, name.as_mut_ptr(), 3, &mut error);
        expect(ErrorCode::BufferTooSmall, status, &error);
        let (out, out_num): (_, *mut u64) = (neighbors.as_mut_ptr(), &mut num);
        let status = bagua_topology_neighbors(unknown, 4, 0, 0, out, 2, out_num, &mut error);
        expect(ErrorCode::TopologyOutOfRange, status, &error);
        let status = bagua_topology_neighbors(0, 4, 4, 0, out, 2, out_num, &mut error);
        let text = expect(ErrorCode::RankOutOfRange, status, &error);
        assert!(text.starts_with("rank is 4 of 4 ranks; expected"), "{text}");
        let status = bagua_topology_neighbors(0, 4, 0, 0, out, 2, out_num, &mut error);
        expect(ErrorCode::BufferTooSmall, status, &error);
    }
    assert_eq!((num, name), (4, [0; 3]));
}
