//! A step does not allocate: `begin`, `ready`, decisions, `suspended` and `finish`, also called
//! through the C ABI.
//!
//! The counter is per thread, so the test harness's own thread does not disturb it.

#![allow(clippy::declare_interior_mutable_const)] // clippy 1.63 reports the expansion of thread_local!

use bagua_rust::ffi::*;
use bagua_rust::step::{Decision, Outcome, StepMachine};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::null_mut;

thread_local! {
    static NUM_ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is left to the system allocator; the counter needs no memory of its own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.with(|count| count.set(count.get() + 1));
        System.alloc(layout)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        System.dealloc(pointer, layout)
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NUM_TENSORS: u64 = 1000;

fn num_allocations(body: impl FnOnce()) -> usize {
    let before = NUM_ALLOCATIONS.with(Cell::get);
    body();
    NUM_ALLOCATIONS.with(Cell::get) - before
}

/// Seven tensors per bucket.
fn bucket_of() -> Vec<u64> {
    (0..NUM_TENSORS).map(|tensor| tensor / 7).collect()
}

/// Every bucket is suspended as often as its number modulo 4 says.
fn take_decisions(step: &mut StepMachine, num_left: &mut [u64]) {
    while let Some(decision) = step.next_decision() {
        if let Decision::Launch(bucket) | Decision::Resume(bucket) = decision {
            if num_left[bucket] > 0 {
                num_left[bucket] -= 1;
                step.suspended(bucket as u64).unwrap();
            }
        }
    }
}

#[test]
fn steps_allocate_nothing() {
    assert!(num_allocations(|| drop(vec![0u8; 10])) == 1, "the counter counts");
    let order: Vec<u64> = (0..NUM_TENSORS).collect();
    let mut step = StepMachine::new(order.len(), true);
    step.lay_out(&bucket_of(), &order).unwrap();
    for num_ready in [NUM_TENSORS, NUM_TENSORS / 2, NUM_TENSORS] {
        let mut num_left: Vec<u64> = (0..NUM_TENSORS).map(|bucket| bucket % 4).collect();
        let in_step = num_allocations(|| {
            step.begin().unwrap();
            for tensor in 0..num_ready {
                if step.ready(tensor ^ 1).unwrap() {
                    take_decisions(&mut step, &mut num_left);
                }
            }
            assert_eq!(step.finish(), Ok(Outcome::Complete));
            take_decisions(&mut step, &mut num_left);
        });
        assert_eq!(in_step, 0);
        assert_eq!(step.num_launched() as u64, NUM_TENSORS / 7 + 1);
        assert_eq!(num_left[..step.num_launched()].iter().sum::<u64>(), 0);
    }
}

#[test]
fn steps_through_the_c_abi_allocate_nothing() {
    let (bucket_of, order): (_, Vec<u64>) = (bucket_of(), (0..NUM_TENSORS).collect());
    let (mut step, mut has_decision, mut decision, mut bucket, mut outcome) = (null_mut(), false, 0, 0, 0);
    let mut num_decisions = 0;
    let mut error = BaguaRustError::new(0, "");
    let e: *mut BaguaRustError = &mut error;
    // SAFETY: a live handle, valid pointers, lengths that are those of the arrays; freed once.
    unsafe {
        assert_eq!(bagua_step_new(NUM_TENSORS, false, &mut step, e), 0);
        let (buckets, order) = (bucket_of.as_ptr(), order.as_ptr());
        assert_eq!(bagua_step_lay_out(step, buckets, NUM_TENSORS, order, NUM_TENSORS, e), 0);
        let in_step = num_allocations(|| {
            assert_eq!(bagua_step_begin(step, e), 0);
            for tensor in (0..NUM_TENSORS).rev() {
                assert_eq!(bagua_step_ready(step, tensor, &mut has_decision, e), 0);
            }
            assert_eq!(bagua_step_finish(step, &mut outcome, e), 0);
            loop {
                assert_eq!(bagua_step_next(step, &mut decision, &mut bucket, e), 0);
                match decision {
                    0 => break,
                    1 => assert_eq!(bagua_step_suspended(step, bucket, e), 0),
                    _ => {}
                }
                num_decisions += 1;
            }
        });
        assert_eq!(in_step, 0);
        assert_eq!((has_decision, outcome), (true, Outcome::Complete as u32));
        assert_eq!(num_decisions, 3 * (NUM_TENSORS / 7 + 1) + 2, "launch, resume, wait; buffers, order");
        assert_eq!(bagua_step_free(step, e), 0);
    }
}
