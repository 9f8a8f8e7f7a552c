//! The C ABI of the planner, the scheduler and the topologies; `include/bagua_rust.h` documents
//! each function.
//!
//! Data path: `csrc/bindings/order.cc` -> **here** -> `planner`, `scheduler`, `topology`.
//!
//! Invariants: the only file with `unsafe`; a null pointer or a panic becomes an error code; on an
//! error no output is written but `error` and, `out_num` (see the header).
//!
//! Proof shared by the `unsafe` blocks: the header makes the caller promise that a non-null pointer
//! is aligned, valid for the length passed with it and not used from another thread during the
//! call. `shared`, `unique`, `input`, `slot` and `output` turn that promise into references and
//! check what can be checked; memory for outputs may be uninitialised.
#![deny(unsafe_op_in_unsafe_fn)]
#![allow(missing_docs, clippy::missing_safety_doc)] // the header documents each function

use std::any::Any;
use std::mem::MaybeUninit;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::slice;

use crate::abi_types::{
    BaguaBucketInfo, BaguaBucketMember, BaguaBucketRange, BaguaNeighbor, BaguaPlanOptions, BaguaRustError,
    BaguaTensorSpec,
};
use crate::error::{Error, ErrorCode};
use crate::planner::{plan, BucketPlan, PlanOptions, PlannedBucket, TensorSpec};
use crate::scheduler::ReadyOrderScheduler;
use crate::topology::{Topology, TOPOLOGIES};

/// Opaque handle of a plan.
pub struct BaguaPlan(BucketPlan);

/// Opaque handle of a scheduler.
pub struct BaguaScheduler(ReadyOrderScheduler);

#[no_mangle]
pub unsafe extern "C" fn bagua_plan_new(
    tensors: *const BaguaTensorSpec,
    num_tensors: u64,
    order: *const u64,
    order_len: u64,
    options: *const BaguaPlanOptions,
    out_plan: *mut *mut BaguaPlan,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for all four.
        let specs = unsafe { input(tensors, num_tensors, "tensors") }?;
        let order = unsafe { input(order, order_len, "order") }?;
        let options = unsafe { shared(options, "options") }?;
        let out_plan = unsafe { slot(out_plan, "out_plan") }?;
        let specs: Vec<TensorSpec> = specs.iter().map(TensorSpec::from).collect();
        let planned = plan(&specs, order, PlanOptions::from(options))?;
        out_plan.write(Box::into_raw(Box::new(BaguaPlan(planned))));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_plan_free(plan: *mut BaguaPlan, error: *mut BaguaRustError) -> i32 {
    // SAFETY: the header's promise; the handle came from `Box::into_raw` in `bagua_plan_new`.
    guard(error, || unsafe { free(plan, "plan") })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_plan_num_buckets(
    plan: *const BaguaPlan,
    out_num_buckets: *mut u64,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for both.
        let plan = unsafe { shared(plan, "plan") }?;
        unsafe { slot(out_num_buckets, "out_num_buckets") }?.write(plan.0.buckets().len() as u64);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_plan_bucket(
    plan: *const BaguaPlan,
    bucket: u64,
    out_info: *mut BaguaBucketInfo,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for both.
        let planned = bucket_at(unsafe { shared(plan, "plan") }?, bucket)?;
        unsafe { slot(out_info, "out_info") }?.write(BaguaBucketInfo::from(planned));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_plan_bucket_members(
    plan: *const BaguaPlan,
    bucket: u64,
    out_members: *mut BaguaBucketMember,
    capacity: u64,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for both.
        let planned = bucket_at(unsafe { shared(plan, "plan") }?, bucket)?;
        let out = unsafe { output(out_members, capacity, planned.members.len(), "out_members") }?;
        out.iter_mut().zip(&planned.members).for_each(|(slot, m)| *slot = MaybeUninit::new(m.into()));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_scheduler_new(
    plan: *const BaguaPlan,
    out_scheduler: *mut *mut BaguaScheduler,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for both.
        let plan = unsafe { shared(plan, "plan") }?;
        let out_scheduler = unsafe { slot(out_scheduler, "out_scheduler") }?;
        out_scheduler.write(Box::into_raw(Box::new(BaguaScheduler(ReadyOrderScheduler::new(&plan.0)))));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_scheduler_free(
    scheduler: *mut BaguaScheduler,
    error: *mut BaguaRustError,
) -> i32 {
    // SAFETY: the header's promise; the handle came from `Box::into_raw` in `bagua_scheduler_new`.
    guard(error, || unsafe { free(scheduler, "scheduler") })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_scheduler_begin_step(
    scheduler: *mut BaguaScheduler,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise.
        unsafe { unique(scheduler, "scheduler") }?.0.begin_step();
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_scheduler_mark_ready(
    scheduler: *mut BaguaScheduler,
    tensor: u64,
    out_range: *mut BaguaBucketRange,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for both.
        let scheduler = unsafe { unique(scheduler, "scheduler") }?;
        let out_range = unsafe { slot(out_range, "out_range") }?;
        out_range.write(scheduler.0.mark_ready(tensor)?.into());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_scheduler_finish(
    scheduler: *mut BaguaScheduler,
    out_range: *mut BaguaBucketRange,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for both.
        let scheduler = unsafe { unique(scheduler, "scheduler") }?;
        let out_range = unsafe { slot(out_range, "out_range") }?;
        out_range.write(scheduler.0.finish()?.into());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_scheduler_missing(
    scheduler: *const BaguaScheduler,
    out_tensors: *mut u64,
    capacity: u64,
    out_num: *mut u64,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for all three.
        let scheduler = &unsafe { shared(scheduler, "scheduler") }?.0;
        let out_num = unsafe { slot(out_num, "out_num") }?;
        let num_missing = scheduler.missing().count();
        out_num.write(num_missing as u64);
        let out = unsafe { output(out_tensors, capacity, num_missing, "out_tensors") }?;
        out.iter_mut().zip(scheduler.missing()).for_each(|(slot, t)| *slot = MaybeUninit::new(t as u64));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_scheduler_observed_order(
    scheduler: *const BaguaScheduler,
    out_tensors: *mut u64,
    capacity: u64,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        // SAFETY: the header's promise, for both.
        let observed = unsafe { shared(scheduler, "scheduler") }?.0.observed_order();
        let out = unsafe { output(out_tensors, capacity, observed.len(), "out_tensors") }?;
        out.iter_mut().zip(observed).for_each(|(slot, &tensor)| *slot = MaybeUninit::new(tensor as u64));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_topology_name(
    topology: u32,
    out_name: *mut u8,
    capacity: u64,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        let name = topology_at(topology)?.name();
        // SAFETY: the header's promise.
        let out = unsafe { output(out_name, capacity, name.len() + 1, "out_name") }?;
        let with_nul = name.bytes().chain(std::iter::once(0));
        out.iter_mut().zip(with_nul).for_each(|(slot, byte)| *slot = MaybeUninit::new(byte));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn bagua_topology_neighbors(
    topology: u32,
    size: u64,
    rank: u64,
    step: u64,
    out_neighbors: *mut BaguaNeighbor,
    capacity: u64,
    out_num: *mut u64,
    error: *mut BaguaRustError,
) -> i32 {
    guard(error, || {
        let topology = topology_at(topology)?;
        let index = |value| usize::try_from(value).map_err(|_| Error::RankOutOfRange { rank, size });
        let neighbors = topology.neighbors(index(size)?, index(rank)?, step)?;
        // SAFETY: the header's promise, for both.
        let out_num = unsafe { slot(out_num, "out_num") }?;
        out_num.write(neighbors.len() as u64);
        let out = unsafe { output(out_neighbors, capacity, neighbors.len(), "out_neighbors") }?;
        out.iter_mut().zip(&neighbors).for_each(|(slot, neighbor)| *slot = MaybeUninit::new(neighbor.into()));
        Ok(())
    })
}

fn topology_at(topology: u32) -> Result<Topology, Error> {
    let found = TOPOLOGIES.get(topology as usize).copied(); // widens
    found.ok_or(Error::TopologyOutOfRange { topology, num_topologies: TOPOLOGIES.len() })
}

fn bucket_at(plan: &BaguaPlan, bucket: u64) -> Result<&PlannedBucket, Error> {
    let buckets = plan.0.buckets();
    let found = usize::try_from(bucket).ok().and_then(|index| buckets.get(index));
    found.ok_or(Error::BucketOutOfRange { bucket, num_buckets: buckets.len() })
}

/// Runs `body` and reports how it ended. `error` is the last argument of an exported function, so
/// the header's promise holds for it.
fn guard(error: *mut BaguaRustError, body: impl FnOnce() -> Result<(), Error>) -> i32 {
    if error.is_null() {
        return ErrorCode::NullPointer as i32;
    }
    // A panic may leave the handle half-changed but never invalid, and the message says to free it.
    let outcome = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|payload| Err(Error::Internal { panic: panic_message(&*payload) }));
    match outcome {
        // SAFETY: not null; two plain stores, which a mark_ready can afford.
        Ok(()) => unsafe {
            (*error).code = 0;
            (*error).message[0] = 0;
            0
        },
        // SAFETY: not null; overwrites plain data.
        Err(cause) => unsafe {
            error.write(BaguaRustError::from(&cause));
            cause.code() as i32
        },
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let literal = payload.downcast_ref::<&str>().map(|message| message.to_string());
    literal.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_string())
}

unsafe fn shared<'a, T>(pointer: *const T, argument: &'static str) -> Result<&'a T, Error> {
    // SAFETY: null is checked; otherwise the header's promise.
    unsafe { pointer.as_ref() }.ok_or(Error::NullPointer { argument })
}

unsafe fn unique<'a, T>(pointer: *mut T, argument: &'static str) -> Result<&'a mut T, Error> {
    // SAFETY: null is checked; otherwise the header's promise.
    unsafe { pointer.as_mut() }.ok_or(Error::NullPointer { argument })
}

unsafe fn slot<'a, T>(pointer: *mut T, argument: &'static str) -> Result<&'a mut MaybeUninit<T>, Error> {
    // SAFETY: MaybeUninit<T> has the layout of T; otherwise as for `unique`.
    unsafe { unique(pointer.cast::<MaybeUninit<T>>(), argument) }
}

/// The caller's array of `len` entries; null is legal for none.
unsafe fn input<'a, T>(pointer: *const T, len: u64, argument: &'static str) -> Result<&'a [T], Error> {
    let num_entries = array_len::<T>(len, argument)?;
    match (num_entries, pointer.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(Error::NullPointer { argument }),
        // SAFETY: not null, size checked; otherwise the header's promise.
        (_, false) => Ok(unsafe { slice::from_raw_parts(pointer, num_entries) }),
    }
}

/// The first `required` entries of the caller's array of `capacity`; null is legal for none.
unsafe fn output<'a, T>(
    pointer: *mut T,
    capacity: u64,
    required: usize,
    argument: &'static str,
) -> Result<&'a mut [MaybeUninit<T>], Error> {
    if capacity < required as u64 {
        return Err(Error::BufferTooSmall { argument, capacity, required });
    }
    match (required, pointer.is_null()) {
        (0, _) => Ok(&mut []),
        (_, true) => Err(Error::NullPointer { argument }),
        // SAFETY: not null and long enough; `required` is the length of a list in memory, so the
        // size fits; MaybeUninit<T> has the layout of T; otherwise the header's promise.
        (_, false) => Ok(unsafe { slice::from_raw_parts_mut(pointer.cast(), required) }),
    }
}

unsafe fn free<T>(handle: *mut T, argument: &'static str) -> Result<(), Error> {
    if handle.is_null() {
        return Err(Error::NullPointer { argument });
    }
    // SAFETY: the caller of `free` proves that the handle came from `Box::into_raw`; the header
    // forbids to use it afterwards.
    drop(unsafe { Box::from_raw(handle) });
    Ok(())
}

/// `len` as the length of an array of `T`, if an array of that size can exist.
fn array_len<T>(len: u64, argument: &'static str) -> Result<usize, Error> {
    usize::try_from(len)
        .ok()
        .filter(|len| {
            len.checked_mul(std::mem::size_of::<T>()).map_or(false, |size| size <= isize::MAX as usize)
        })
        .ok_or(Error::ArrayTooLong { argument, len })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status_of(body: impl FnOnce() -> Result<(), Error>) -> (i32, BaguaRustError) {
        let mut error = BaguaRustError::from(&Error::AlreadyReady { tensor: 1 }); // stale content
        (guard(&mut error, body), error)
    }

    #[test]
    fn success_clears_the_error() {
        let (status, error) = status_of(|| Ok(()));
        assert_eq!((status, error.code, error.text()), (0, 0, String::new()));
    }

    #[test]
    fn panics_become_internal_errors() {
        let line = 7;
        let with_literal = status_of(|| panic!("broken invariant"));
        let with_format = status_of(|| panic!("broken invariant {line}"));
        let with_value = status_of(|| std::panic::panic_any(line));
        for ((status, error), expected) in [
            (with_literal, "broken invariant;"),
            (with_format, "broken invariant 7;"),
            (with_value, "no message;"),
        ] {
            assert_eq!((status, error.code), (100, 100));
            assert!(error.text().contains(expected), "{}", error.text());
        }
    }

    #[test]
    fn impossible_lengths_are_refused() {
        let num_entries = isize::MAX as u64 / 8;
        assert_eq!(array_len::<u64>(num_entries, "order"), Ok(num_entries as usize));
        for len in [num_entries + 1, u64::MAX] {
            assert_eq!(array_len::<u64>(len, "order"), Err(Error::ArrayTooLong { argument: "order", len }));
        }
    }
}
