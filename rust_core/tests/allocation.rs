//! A step on the hot path allocates nothing: neither `begin_step`, nor `mark_ready`, nor `finish`,
//! nor the same through the C ABI.
//!
//! The counter is per thread, so the test harness's own thread does not disturb it.

#![allow(clippy::declare_interior_mutable_const)] // clippy 1.63 means what thread_local! expands to

use bagua_rust::abi_types::{BaguaBucketRange, BaguaPlanOptions, BaguaRustError, BaguaTensorSpec};
use bagua_rust::ffi::*;
use bagua_rust::planner::{plan, PlanOptions, TensorSpec};
use bagua_rust::scheduler::ReadyOrderScheduler;
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

#[test]
fn steps_allocate_nothing() {
    let tensors = vec![TensorSpec { numel: 100, item_bytes: 4, key: 0 }; NUM_TENSORS as usize];
    let order: Vec<u64> = (0..NUM_TENSORS).collect();
    let options = PlanOptions { small_bucket_bytes: 1024, bucket_bytes: 4096, align_bytes: 64 };
    assert!(num_allocations(|| drop(vec![0u8; 10])) == 1, "the counter counts");
    let mut scheduler = ReadyOrderScheduler::new(&plan(&tensors, &order, options).unwrap());
    let in_steps = num_allocations(|| {
        for num_ready in [NUM_TENSORS, NUM_TENSORS / 2, NUM_TENSORS] {
            scheduler.begin_step();
            (0..num_ready).rev().for_each(|tensor| assert!(scheduler.mark_ready(tensor).is_ok()));
            assert!(scheduler.finish().is_ok());
        }
    });
    assert_eq!(in_steps, 0);
}

#[test]
fn steps_through_the_c_abi_allocate_nothing() {
    let specs = vec![BaguaTensorSpec { numel: 100, key: 0, item_bytes: 4 }; NUM_TENSORS as usize];
    let order: Vec<u64> = (0..NUM_TENSORS).collect();
    let options = BaguaPlanOptions { small_bucket_bytes: 1024, bucket_bytes: 4096, align_bytes: 64 };
    let (mut plan, mut scheduler, mut range) = (null_mut(), null_mut(), BaguaBucketRange::default());
    let mut error = BaguaRustError::new(0, "");
    let e: *mut BaguaRustError = &mut error;
    // SAFETY: live handles, valid pointers, lengths that are those of the arrays; freed once.
    unsafe {
        let (tensors, order) = (specs.as_ptr(), order.as_ptr());
        assert_eq!(bagua_plan_new(tensors, NUM_TENSORS, order, NUM_TENSORS, &options, &mut plan, e), 0);
        assert_eq!(bagua_scheduler_new(plan, &mut scheduler, e), 0);
        let in_step = num_allocations(|| {
            assert_eq!(bagua_scheduler_begin_step(scheduler, e), 0);
            for tensor in (0..NUM_TENSORS).rev() {
                assert_eq!(bagua_scheduler_mark_ready(scheduler, tensor, &mut range, e), 0);
            }
            assert_eq!(bagua_scheduler_finish(scheduler, &mut range, e), 0);
        });
        assert_eq!(in_step, 0);
        assert_eq!(bagua_scheduler_free(scheduler, e), 0);
        assert_eq!(bagua_plan_free(plan, e), 0);
    }
}
