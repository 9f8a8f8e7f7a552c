//! The C ABI as C uses it: round trips against the Rust types, null pointers, short arrays, codes
//! and messages.
//!
//! Panics and the cutting of messages are tested beside their code, in `src/ffi.rs`, because no
//! argument makes the library panic.

use bagua_rust::error::ErrorCode;
use bagua_rust::ffi::*;
use bagua_rust::planner::{plan, PlanOptions, TensorSpec};
use bagua_rust::step::{Outcome, StepMachine};
use bagua_rust::topology::{Neighbor, TOPOLOGIES};
use std::ptr::{null, null_mut};

const OPTIONS: PlanOptions = PlanOptions { small_bucket_bytes: 128, bucket_bytes: 128, align_bytes: 64 };
const NUM_TENSORS: u64 = 5;
const ORDER: [u64; 5] = [4, 3, 2, 1, 0];
const BUCKET_OF: [u64; 5] = [2, 1, 0, 1, 0]; // the expected plan
const NO_NEIGHBOR: Neighbor = Neighbor { rank: 99, weight: 0.0, is_source: false, is_target: false };

fn specs() -> Vec<TensorSpec> {
    (0..NUM_TENSORS).map(|tensor| TensorSpec { numel: 10 + tensor, key: tensor % 2, item_bytes: 4 }).collect()
}

fn no_error() -> BaguaRustError {
    BaguaRustError::new(-1, "not written")
}

/// Asserts that the status and the error's code are as expected; returns the message.
fn expect(code: ErrorCode, status: i32, error: &BaguaRustError) -> String {
    assert_eq!((status, error.code), (code as i32, code as i32), "{}", error.text());
    error.text()
}

fn expect_ok(status: i32, error: &BaguaRustError) {
    assert_eq!((status, error.code, error.text()), (0, 0, String::new()));
}

/// A step with the layout of the plan; freed at the end.
struct Step(*mut StepMachine);

impl Step {
    fn new() -> Self {
        let (mut step, mut error) = (null_mut(), no_error());
        // SAFETY: valid pointers, and lengths that are those of the arrays.
        unsafe {
            expect_ok(bagua_step_new(NUM_TENSORS, false, &mut step, &mut error), &error);
            let (buckets, order) = (BUCKET_OF.as_ptr(), ORDER.as_ptr());
            expect_ok(bagua_step_lay_out(step, buckets, 5, order, 5, &mut error), &error);
        }
        Step(step)
    }

    fn ready(&self, tensor: u64) -> bool {
        let (mut has_decision, mut error) = (false, no_error());
        // SAFETY: a live handle and valid pointers; so in the following.
        expect_ok(unsafe { bagua_step_ready(self.0, tensor, &mut has_decision, &mut error) }, &error);
        has_decision
    }

    fn next(&self) -> (u32, u64) {
        let (mut decision, mut bucket, mut error) = (99, 99, no_error());
        // SAFETY: as above.
        expect_ok(unsafe { bagua_step_next(self.0, &mut decision, &mut bucket, &mut error) }, &error);
        (decision, bucket)
    }

    fn state(&self) -> (bool, u64) {
        let (mut is_open, mut num_launched, mut error) = (false, 99, no_error());
        // SAFETY: as above.
        expect_ok(unsafe { bagua_step_state(self.0, &mut is_open, &mut num_launched, &mut error) }, &error);
        (is_open, num_launched)
    }

    fn list(&self, function: List) -> Option<Vec<usize>> {
        let (mut tensors, mut num, mut error) = (vec![99; 6], 99, no_error());
        // SAFETY: as above; the capacity is less than the array's length.
        expect_ok(unsafe { function(self.0, tensors.as_mut_ptr(), 5, &mut num, &mut error) }, &error);
        if num == BAGUA_NO_LIST {
            assert_eq!(tensors, [99; 6]);
            return None;
        }
        let spare = tensors.split_off(num as usize);
        assert!(spare.iter().all(|&tensor| tensor == 99), "written past the list's end: {spare:?}");
        Some(tensors)
    }
}

type List = unsafe extern "C" fn(*const StepMachine, *mut usize, u64, *mut u64, *mut BaguaRustError) -> i32;

impl Drop for Step {
    fn drop(&mut self) {
        let mut error = no_error();
        // SAFETY: a handle from `new`, freed once.
        expect_ok(unsafe { bagua_step_free(self.0, &mut error) }, &error);
    }
}

#[test]
fn a_plan_crosses_the_boundary_unchanged() {
    let (specs, mut error, mut num_buckets) = (specs(), no_error(), 0);
    let expected = plan(&specs, &ORDER, OPTIONS).unwrap();
    let (mut buckets, mut offsets, mut numels) = ([99; 5], [99; 5], [99; 5]);
    // SAFETY: valid pointers, capacities that are the arrays' lengths.
    let status = unsafe {
        let (tensors, order) = (specs.as_ptr(), ORDER.as_ptr());
        let (buckets, offsets, numels) = (buckets.as_mut_ptr(), offsets.as_mut_ptr(), numels.as_mut_ptr());
        bagua_plan(tensors, 5, order, 5, &OPTIONS, buckets, offsets, numels, &mut num_buckets, &mut error)
    };
    expect_ok(status, &error);
    assert_eq!(buckets, BUCKET_OF);
    assert_eq!(buckets.map(|bucket| bucket as usize).to_vec(), expected.bucket_of);
    assert_eq!(offsets.to_vec(), expected.offset_numel_of);
    assert_eq!(numels[..num_buckets as usize], expected.bucket_numels);
    assert_eq!(numels[num_buckets as usize..], [99; 2], "entries past the last bucket are not touched");
}

#[test]
fn a_step_crosses_the_boundary_unchanged() {
    let (step, mut error, mut is_new, mut outcome) = (Step::new(), no_error(), false, 99);
    assert_eq!(step.list(bagua_step_missing), Some(vec![0, 1, 2, 3, 4]));
    assert_eq!(step.list(bagua_step_observed_order), Some(vec![4, 3, 2, 1, 0]));
    // SAFETY: a live handle, valid pointers, lengths that are the array's.
    unsafe {
        for expected in [true, false] {
            expect_ok(bagua_step_set_stage(step.0, -3, true, &mut is_new, &mut error), &error);
            assert_eq!(is_new, expected);
        }
        expect_ok(bagua_step_begin(step.0, &mut error), &error);
        assert_eq!(step.state(), (true, 0));
        assert_eq!([4, 2].map(|tensor| step.ready(tensor)), [false, true]);
        assert_eq!(step.next(), (1, 0));
        expect_ok(bagua_step_suspended(step.0, 0, &mut error), &error);
        assert_eq!(step.next(), (0, 0));
        assert_eq!([1, 3].map(|tensor| step.ready(tensor)), [false, true]);
        assert_eq!(step.list(bagua_step_missing), Some(vec![0]));
        assert_eq!([step.next(), step.next()], [(1, 1), (0, 0)]);
        assert_eq!(step.state(), (true, 2));
        assert!(step.ready(0));
        expect_ok(bagua_step_finish(step.0, &mut outcome, &mut error), &error);
        assert_eq!((outcome, step.state()), (Outcome::Complete as u32, (false, 2)));
        let decisions = [(1, 2), (2, 0), (6, 0), (3, 0), (3, 1), (3, 2), (7, 0), (0, 0)];
        assert_eq!(decisions.map(|_| step.next()), decisions);

        let observed = step.list(bagua_step_observed_order).unwrap();
        assert_eq!(observed, [4, 2, 1, 3, 0]);
        assert_eq!((step.list(bagua_step_agreed_order), step.list(bagua_step_layout_due)), (None, None));
        let order = [4, 2, 1, 3, 0];
        expect_ok(bagua_step_agree(step.0, order.as_ptr(), 5, &mut error), &error);
        assert_eq!(step.list(bagua_step_agreed_order).as_ref(), Some(&observed));
        assert_eq!(step.list(bagua_step_layout_due).as_ref(), Some(&observed));
        let buckets = BUCKET_OF.as_ptr();
        expect_ok(bagua_step_lay_out(step.0, buckets, 5, order.as_ptr(), 5, &mut error), &error);
        assert_eq!(step.list(bagua_step_layout_due), None);

        expect_ok(bagua_step_begin(step.0, &mut error), &error);
        expect_ok(bagua_step_abort(step.0, &mut error), &error);
        assert_eq!(step.state(), (false, 0));
    }
}

/// Every decision and outcome that has no bucket, under its number.
#[test]
fn decisions_have_their_numbers() {
    let (mut step, mut error, mut outcome, mut is_new) = (null_mut(), no_error(), 99, false);
    // SAFETY: as above; freed by `Step`.
    unsafe {
        expect_ok(bagua_step_new(5, true, &mut step, &mut error), &error);
        let step = Step(step);
        let (buckets, order) = ([0; 5], ORDER.as_ptr());
        expect_ok(bagua_step_lay_out(step.0, buckets.as_ptr(), 5, order, 5, &mut error), &error);
        expect_ok(bagua_step_begin(step.0, &mut error), &error);
        expect_ok(bagua_step_finish(step.0, &mut outcome, &mut error), &error);
        let decisions = [(1, 0), (6, 0), (4, 0), (3, 0), (5, 0), (7, 0), (0, 0)];
        assert_eq!(decisions.map(|_| step.next()), decisions);
        expect_ok(bagua_step_set_stage(step.0, 1, false, &mut is_new, &mut error), &error);
        expect_ok(bagua_step_begin(step.0, &mut error), &error);
        expect_ok(bagua_step_finish(step.0, &mut outcome, &mut error), &error);
        assert_eq!([step.next(), step.next()], [(6, 0), (0, 0)]);
    }
    let step = Step::new();
    for (tensors, expected) in [(0..0, Outcome::Untouched), (0..4, Outcome::Incomplete)] {
        // SAFETY: as above.
        unsafe {
            expect_ok(bagua_step_begin(step.0, &mut error), &error);
            tensors.for_each(|tensor| assert!(!step.ready(tensor)));
            expect_ok(bagua_step_finish(step.0, &mut outcome, &mut error), &error);
        }
        assert_eq!(outcome, expected as u32);
    }
}

#[test]
fn misuse_of_a_step_has_its_own_codes() {
    let (step, mut error, mut is_new, mut outcome) = (Step::new(), no_error(), true, 99);
    let (buckets, order) = (BUCKET_OF.as_ptr(), ORDER.as_ptr());
    let (mut has_decision, mut unlaid) = (true, null_mut());
    let e: *mut BaguaRustError = &mut error;
    // SAFETY: live handles, valid pointers, lengths within the arrays'; freed once.
    unsafe {
        expect_ok(bagua_step_new(5, false, &mut unlaid, e), &*e);
        expect(ErrorCode::NotLaidOut, bagua_step_begin(unlaid, e), &*e);
        expect_ok(bagua_step_free(unlaid, e), &*e);
        expect(ErrorCode::StepNotStarted, bagua_step_ready(step.0, 0, &mut has_decision, e), &*e);
        expect(ErrorCode::StepNotStarted, bagua_step_finish(step.0, &mut outcome, e), &*e);
        expect(ErrorCode::InvalidBuckets, bagua_step_lay_out(step.0, buckets, 4, order, 5, e), &*e);
        expect(ErrorCode::InvalidOrder, bagua_step_lay_out(step.0, buckets, 5, order, 4, e), &*e);
        expect(ErrorCode::InvalidOrder, bagua_step_agree(step.0, order, 4, e), &*e);
        expect_ok(bagua_step_begin(step.0, e), &*e);
        let text =
            expect(ErrorCode::TensorOutOfRange, bagua_step_ready(step.0, 5, &mut has_decision, e), &*e);
        assert_eq!(text, "tensor index is 5; expected below 5; pass an index into the list that was planned");
        assert!(!step.ready(2));
        expect(ErrorCode::AlreadyReady, bagua_step_ready(step.0, 2, &mut has_decision, e), &*e);
        expect(ErrorCode::StepOpen, bagua_step_lay_out(step.0, buckets, 5, order, 5, e), &*e);
        expect(ErrorCode::StepOpen, bagua_step_set_stage(step.0, 1, true, &mut is_new, e), &*e);
        expect(ErrorCode::NotStartedLast, bagua_step_suspended(step.0, 0, e), &*e);
    }
    assert_eq!((has_decision, is_new, outcome), (true, true, 99), "no output on an error");
}

#[test]
fn short_arrays_are_refused_and_the_size_needed_is_told() {
    let (step, mut error, mut num) = (Step::new(), no_error(), 0);
    let mut tensors = [99; 5];
    for list in [bagua_step_missing as List, bagua_step_observed_order as List] {
        for (out, capacity) in [(tensors.as_mut_ptr(), 4), (null_mut(), 0)] {
            // SAFETY: a live handle, valid pointers, capacities within the array's length.
            let status = unsafe { list(step.0, out, capacity, &mut num, &mut error) };
            let text = expect(ErrorCode::BufferTooSmall, status, &error);
            let start = format!("out_tensors has {capacity} entries; expected at least 5");
            assert!(text.starts_with(&start), "{text}");
            assert_eq!(num, NUM_TENSORS);
        }
    }
    assert_eq!(tensors, [99; 5]);
}

/// Every pointer of every function, one at a time.
#[test]
#[rustfmt::skip] // a table
fn null_pointers_are_refused() {
    let (handle, specs, order, none) = (Step::new(), specs(), ORDER.as_ptr(), null_mut());
    let (step, specs, buckets) = (handle.0, specs.as_ptr(), BUCKET_OF.as_ptr());
    let (mut num, mut flag, mut number) = (0, false, 0);
    let (mut a, mut b, mut c, mut tensors) = ([0; 5], [0; 5], [0; 5], [0; 5]);
    let (a, b, c, out) = (a.as_mut_ptr(), b.as_mut_ptr(), c.as_mut_ptr(), tensors.as_mut_ptr());
    let mut neighbor = [NO_NEIGHBOR; 4];
    let neighbors = neighbor.as_mut_ptr();
    let mut error = no_error();
    let e: *mut BaguaRustError = &mut error;
    // SAFETY: pointers are live and valid, or null, which is the subject.
    let statuses = unsafe {
        bagua_step_begin(step, e);
        bagua_step_agree(step, order, 5, e);
        [
            ("tensors", bagua_plan(null(), 5, order, 5, &OPTIONS, a, b, c, &mut num, e), (*e).text()),
            ("order", bagua_plan(specs, 5, null(), 5, &OPTIONS, a, b, c, &mut num, e), (*e).text()),
            ("options", bagua_plan(specs, 5, order, 5, null(), a, b, c, &mut num, e), (*e).text()),
            ("out_bucket", bagua_plan(specs, 5, order, 5, &OPTIONS, none, b, c, &mut num, e), (*e).text()),
            ("out_offset_numel", bagua_plan(specs, 5, order, 5, &OPTIONS, a, none, c, &mut num, e), (*e).text()),
            ("out_bucket_numel", bagua_plan(specs, 5, order, 5, &OPTIONS, a, b, none, &mut num, e), (*e).text()),
            ("out_num_buckets", bagua_plan(specs, 5, order, 5, &OPTIONS, a, b, c, null_mut(), e), (*e).text()),
            ("out_step", bagua_step_new(5, false, null_mut(), e), (*e).text()),
            ("step", bagua_step_free(null_mut(), e), (*e).text()),
            ("step", bagua_step_lay_out(null_mut(), buckets, 5, order, 5, e), (*e).text()),
            ("bucket_of", bagua_step_lay_out(step, null(), 5, order, 5, e), (*e).text()),
            ("order", bagua_step_lay_out(step, buckets, 5, null(), 5, e), (*e).text()),
            ("step", bagua_step_set_stage(null_mut(), 0, true, &mut flag, e), (*e).text()),
            ("out_is_new", bagua_step_set_stage(step, 0, true, null_mut(), e), (*e).text()),
            ("step", bagua_step_begin(null_mut(), e), (*e).text()),
            ("step", bagua_step_ready(null_mut(), 0, &mut flag, e), (*e).text()),
            ("out_has_decision", bagua_step_ready(step, 0, null_mut(), e), (*e).text()),
            ("step", bagua_step_next(null_mut(), &mut number, &mut num, e), (*e).text()),
            ("out_decision", bagua_step_next(step, null_mut(), &mut num, e), (*e).text()),
            ("out_bucket", bagua_step_next(step, &mut number, null_mut(), e), (*e).text()),
            ("step", bagua_step_suspended(null_mut(), 0, e), (*e).text()),
            ("step", bagua_step_finish(null_mut(), &mut number, e), (*e).text()),
            ("out_outcome", bagua_step_finish(step, null_mut(), e), (*e).text()),
            ("step", bagua_step_abort(null_mut(), e), (*e).text()),
            ("step", bagua_step_agree(null_mut(), order, 5, e), (*e).text()),
            ("order", bagua_step_agree(step, null(), 5, e), (*e).text()),
            ("step", bagua_step_state(null_mut(), &mut flag, &mut num, e), (*e).text()),
            ("out_is_open", bagua_step_state(step, null_mut(), &mut num, e), (*e).text()),
            ("out_num_launched", bagua_step_state(step, &mut flag, null_mut(), e), (*e).text()),
            ("step", bagua_step_missing(null_mut(), out, 5, &mut num, e), (*e).text()),
            ("out_tensors", bagua_step_missing(step, null_mut(), 5, &mut num, e), (*e).text()),
            ("out_num", bagua_step_missing(step, out, 5, null_mut(), e), (*e).text()),
            ("step", bagua_step_observed_order(null_mut(), out, 5, &mut num, e), (*e).text()),
            ("out_tensors", bagua_step_observed_order(step, null_mut(), 5, &mut num, e), (*e).text()),
            ("out_num", bagua_step_observed_order(step, out, 5, null_mut(), e), (*e).text()),
            ("step", bagua_step_agreed_order(null_mut(), out, 5, &mut num, e), (*e).text()),
            ("out_tensors", bagua_step_agreed_order(step, null_mut(), 5, &mut num, e), (*e).text()),
            ("out_num", bagua_step_agreed_order(step, out, 5, null_mut(), e), (*e).text()),
            ("step", bagua_step_layout_due(null_mut(), out, 5, &mut num, e), (*e).text()),
            ("out_num", bagua_step_layout_due(step, out, 5, null_mut(), e), (*e).text()),
            ("out_name", bagua_topology_name(0, null_mut(), 32, e), (*e).text()),
            ("out_neighbors", bagua_topology_neighbors(0, 4, 1, 0, null_mut(), 4, &mut num, e), (*e).text()),
            ("out_num", bagua_topology_neighbors(0, 4, 1, 0, neighbors, 4, null_mut(), e), (*e).text()),
        ]
    };
    for (argument, status, text) in statuses {
        assert_eq!(status, ErrorCode::NullPointer as i32, "{argument}: {text}");
        assert!(text.starts_with(&format!("{argument} is null")), "{argument}: {text}");
    }
    // The refused calls above changed nothing: tensor 0 can still be marked, the step still finished.
    handle.ready(0);
    assert_eq!(handle.state(), (true, 0));
}

#[test]
#[rustfmt::skip] // a table
fn a_null_error_is_refused_by_every_function() {
    let (handle, specs, order) = (Step::new(), specs(), ORDER.as_ptr());
    let (step, specs, buckets) = (handle.0, specs.as_ptr(), BUCKET_OF.as_ptr());
    let (mut no_step, mut num, mut flag, mut number) = (null_mut(), 0, false, 0);
    let (mut a, mut b, mut c, mut tensors) = ([0; 5], [0; 5], [0; 5], [0; 5]);
    let (a, b, c, out) = (a.as_mut_ptr(), b.as_mut_ptr(), c.as_mut_ptr(), tensors.as_mut_ptr());
    let (mut name, mut neighbors) = ([0; 32], [NO_NEIGHBOR; 4]);
    // SAFETY: pointers are live and valid, but for the null error; `free` must not free.
    let statuses = unsafe {
        [
            bagua_plan(specs, 5, order, 5, &OPTIONS, a, b, c, &mut num, null_mut()),
            bagua_step_new(5, false, &mut no_step, null_mut()),
            bagua_step_free(step, null_mut()),
            bagua_step_lay_out(step, buckets, 5, order, 5, null_mut()),
            bagua_step_set_stage(step, 0, true, &mut flag, null_mut()),
            bagua_step_begin(step, null_mut()),
            bagua_step_ready(step, 0, &mut flag, null_mut()),
            bagua_step_next(step, &mut number, &mut num, null_mut()),
            bagua_step_suspended(step, 0, null_mut()),
            bagua_step_finish(step, &mut number, null_mut()),
            bagua_step_abort(step, null_mut()),
            bagua_step_agree(step, order, 5, null_mut()),
            bagua_step_state(step, &mut flag, &mut num, null_mut()),
            bagua_step_missing(step, out, 5, &mut num, null_mut()),
            bagua_step_observed_order(step, out, 5, &mut num, null_mut()),
            bagua_step_agreed_order(step, out, 5, &mut num, null_mut()),
            bagua_step_layout_due(step, out, 5, &mut num, null_mut()),
            bagua_topology_name(0, name.as_mut_ptr(), 32, null_mut()),
            bagua_topology_neighbors(0, 4, 1, 0, neighbors.as_mut_ptr(), 4, &mut num, null_mut()),
        ]
    };
    assert_eq!(statuses, [ErrorCode::NullPointer as i32; 19]);
    assert!(no_step.is_null());
}

#[test]
fn no_tensors_need_no_arrays_and_impossible_lengths_are_refused() {
    let (mut step, mut num, mut error, mut outcome) = (null_mut(), 9, no_error(), 99);
    let (specs, order, none) = (specs(), ORDER.as_ptr(), null_mut());
    let e: *mut BaguaRustError = &mut error;
    // SAFETY: null arrays have length 0; the impossible length is refused before the array is read.
    unsafe {
        expect_ok(bagua_plan(null(), 0, null(), 0, &OPTIONS, none, none, none, &mut num, e), &*e);
        assert_eq!(num, 0);
        expect_ok(bagua_step_new(0, false, &mut step, e), &*e);
        expect_ok(bagua_step_lay_out(step, null(), 0, null(), 0, e), &*e);
        expect_ok(bagua_step_begin(step, e), &*e);
        expect_ok(bagua_step_finish(step, &mut outcome, e), &*e);
        expect_ok(bagua_step_agree(step, null(), 0, e), &*e);
        for list in [bagua_step_missing as List, bagua_step_observed_order, bagua_step_agreed_order] {
            num = 9;
            expect_ok(list(step, null_mut(), 0, &mut num, e), &*e);
            assert_eq!(num, 0);
        }
        expect_ok(bagua_step_free(step, e), &*e);
        step = null_mut();
        let status = bagua_plan(specs.as_ptr(), u64::MAX, order, 5, &OPTIONS, none, none, none, &mut num, e);
        expect(ErrorCode::Overflow, status, &*e);
        expect(ErrorCode::Overflow, bagua_step_new(u64::MAX, false, &mut step, e), &*e);
    }
    assert!(step.is_null());
}

#[test]
fn neighbourhoods_cross_the_boundary_unchanged() {
    let (mut error, mut num, mut name) = (no_error(), 0, [0; 32]);
    let mut neighbors = [NO_NEIGHBOR; 6];
    for (index, topology) in TOPOLOGIES.iter().enumerate() {
        // SAFETY: valid pointers, capacities are the arrays' lengths.
        unsafe {
            expect_ok(bagua_topology_name(index as u32, name.as_mut_ptr(), 32, &mut error), &error);
            let (out, out_num) = (neighbors.as_mut_ptr(), &mut num);
            expect_ok(bagua_topology_neighbors(index as u32, 6, 4, 7, out, 6, out_num, &mut error), &error);
        }
        let nul = name.iter().position(|&byte| byte == 0).unwrap();
        assert_eq!(&name[..nul], topology.name().as_bytes());
        assert_eq!(neighbors[..num as usize], topology.neighbors(6, 4, 7).unwrap());
    }
}

#[test]
fn misuse_of_topologies_has_its_own_codes() {
    let (mut error, mut num, mut name) = (no_error(), 0u64, [0; 3]);
    let mut neighbors = [NO_NEIGHBOR; 2];
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
