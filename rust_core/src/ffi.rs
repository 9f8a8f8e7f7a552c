//! The C ABI of the planner, the step, the topologies and the simulator; `include/bagua_rust.h`
//! documents each function.
//!
//! Data path: `csrc/bindings/order.cc`, `topology.cc`, `simulator.cc` -> **here** -> the file of that name.
//!
//! Invariants: this is the only file with `unsafe`. A null pointer or a panic becomes an error code.
//! On an error no output is written except `error` and, where the header says so, `out_num`. A
//! message always ends with a NUL and is valid UTF-8. Types shared with C are `repr(C)` and hold no
//! pointer; every bit pattern that C may write is valid, except for a bool.
//!
//! Proof shared by the `unsafe` blocks: the header makes the caller promise that a non-null pointer
//! is aligned, valid for the length passed with it and not used from another thread during the
//! call. `shared`, `unique`, `input`, `slot` and `output` turn that promise into references and
//! check what can be checked; memory for outputs may be uninitialised.
#![deny(unsafe_op_in_unsafe_fn)]
#![allow(missing_docs, clippy::missing_safety_doc)] // the header documents each function

use std::any::Any;
use std::mem::{size_of, MaybeUninit};
use std::os::raw::c_char;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::slice;

use crate::error::{Error, ErrorCode};
use crate::planner::{plan, PlanOptions, TensorSpec};
use crate::rehearsed::{cost, Cost, Network, Step};
use crate::simulator::{play, Conditions, Entry, Operation};
use crate::step::{Decision, StepMachine};
use crate::topology::{Neighbor, Topology, TOPOLOGIES};

// Indices are usize here and uint64_t in the header.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

/// Bytes of [`BaguaRustError::message`], the terminating NUL included.
pub const MESSAGE_BYTES: usize = 256;

/// The status and message of one call, in memory of the caller.
#[repr(C)]
#[derive(Clone)]
pub struct BaguaRustError {
    /// An [`ErrorCode`], or 0.
    pub code: i32,
    /// NUL-terminated UTF-8, cut at a character boundary; empty on success.
    pub message: [c_char; MESSAGE_BYTES],
}

impl BaguaRustError {
    /// An error with `message`, cut to fit.
    pub fn new(code: i32, message: &str) -> Self {
        let mut len = message.len().min(MESSAGE_BYTES - 1);
        while !message.is_char_boundary(len) {
            len -= 1; // ends: 0 is a boundary
        }
        let mut error = BaguaRustError { code, message: [0; MESSAGE_BYTES] };
        for (slot, &byte) in error.message.iter_mut().zip(&message.as_bytes()[..len]) {
            *slot = byte as c_char; // keeps the bits; c_char is u8 or i8 by platform
        }
        error
    }

    /// The message without its NUL.
    pub fn text(&self) -> String {
        let bytes: Vec<u8> =
            self.message.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl From<&Error> for BaguaRustError {
    fn from(error: &Error) -> Self {
        BaguaRustError::new(error.code() as i32, &error.to_string())
    }
}

/// The value of `*out_num` if there is no list.
pub const BAGUA_NO_LIST: u64 = u64::MAX;

/// Defines the exported functions. Each gets `error` as its last argument and runs in `guard`.
macro_rules! export {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($argument: $type,)* error: *mut BaguaRustError) -> i32 {
            guard(error, || {
                // SAFETY: the header's promise; `bagua_step_free` has a proof of its own.
                unsafe { $body }
                Ok(())
            })
        }
    )*};
}

export! {
    fn bagua_plan(
        tensors: *const TensorSpec, num_tensors: u64, order: *const u64, order_len: u64,
        options: *const PlanOptions, out_bucket: *mut u64, out_offset_numel: *mut u64,
        out_bucket_numel: *mut u64, out_num_buckets: *mut u64
    ) {
        let tensors = input(tensors, num_tensors, "tensors")?;
        let order = input(order, order_len, "order")?;
        let options = shared(options, "options")?;
        let out_bucket = output(out_bucket, num_tensors, "out_bucket")?;
        let out_offset_numel = output(out_offset_numel, num_tensors, "out_offset_numel")?;
        let out_bucket_numel = output(out_bucket_numel, num_tensors, "out_bucket_numel")?;
        let out_num_buckets = slot(out_num_buckets, "out_num_buckets")?;
        let planned = plan(tensors, order, *options)?;
        fill(out_bucket, planned.bucket_of.iter().map(|&bucket| bucket as u64));
        fill(out_offset_numel, planned.offset_numel_of.iter().copied());
        fill(out_bucket_numel, planned.bucket_numels.iter().copied());
        out_num_buckets.write(planned.bucket_numels.len() as u64);
    }

    fn bagua_step_new(num_tensors: u64, finds_unused: bool, out_step: *mut *mut StepMachine) {
        let num_tensors = array_len::<(usize, usize)>(num_tensors, "num_tensors")?;
        let out_step = slot(out_step, "out_step")?;
        out_step.write(Box::into_raw(Box::new(StepMachine::new(num_tensors, finds_unused))));
    }

    fn bagua_step_free(step: *mut StepMachine) {
        // The handle came from `Box::into_raw` in `bagua_step_new`, and is not used afterwards.
        drop(Box::from_raw(unique(step, "step")?));
    }

    fn bagua_step_lay_out(
        step: *mut StepMachine, bucket_of: *const u64, bucket_of_len: u64, order: *const u64, order_len: u64
    ) {
        let bucket_of = input(bucket_of, bucket_of_len, "bucket_of")?;
        unique(step, "step")?.lay_out(bucket_of, input(order, order_len, "order")?)?;
    }

    fn bagua_step_set_stage(step: *mut StepMachine, stage: i64, launches: bool, out_is_new: *mut bool) {
        let out_is_new = slot(out_is_new, "out_is_new")?;
        out_is_new.write(unique(step, "step")?.set_stage(stage, launches)?);
    }

    fn bagua_step_begin(step: *mut StepMachine) {
        unique(step, "step")?.begin()?;
    }

    fn bagua_step_ready(step: *mut StepMachine, tensor: u64, out_has_decision: *mut bool) {
        let out_has_decision = slot(out_has_decision, "out_has_decision")?;
        out_has_decision.write(unique(step, "step")?.ready(tensor)?);
    }

    fn bagua_step_next(step: *mut StepMachine, out_decision: *mut u32, out_bucket: *mut u64) {
        let (out_decision, out_bucket) = (slot(out_decision, "out_decision")?, slot(out_bucket, "out_bucket")?);
        let (decision, bucket) = match unique(step, "step")?.next_decision() {
            None => (0, 0),
            Some(Decision::Launch(bucket)) => (1, bucket),
            Some(Decision::Resume(bucket)) => (2, bucket),
            Some(Decision::Wait(bucket)) => (3, bucket),
            Some(Decision::AgreeOnUse) => (4, 0),
            Some(Decision::FinalizeUse) => (5, 0),
            Some(Decision::SendBuffers) => (6, 0),
            Some(Decision::AgreeOnOrder) => (7, 0),
        };
        out_decision.write(decision);
        out_bucket.write(bucket as u64);
    }

    fn bagua_step_suspended(step: *mut StepMachine, bucket: u64) {
        unique(step, "step")?.suspended(bucket)?;
    }

    fn bagua_step_finish(step: *mut StepMachine, out_outcome: *mut u32) {
        let out_outcome = slot(out_outcome, "out_outcome")?;
        out_outcome.write(unique(step, "step")?.finish()? as u32);
    }

    fn bagua_step_abort(step: *mut StepMachine) {
        unique(step, "step")?.abort();
    }

    fn bagua_step_agree(step: *mut StepMachine, order: *const u64, order_len: u64) {
        unique(step, "step")?.agree(input(order, order_len, "order")?)?;
    }

    fn bagua_step_state(step: *const StepMachine, out_is_open: *mut bool, out_num_launched: *mut u64) {
        let out_is_open = slot(out_is_open, "out_is_open")?;
        let out_num_launched = slot(out_num_launched, "out_num_launched")?;
        let step = shared(step, "step")?;
        out_is_open.write(step.is_open());
        out_num_launched.write(step.num_launched() as u64);
    }

    fn bagua_step_missing(step: *const StepMachine, out_tensors: *mut usize, capacity: u64, out_num: *mut u64) {
        list("out_tensors", Some(shared(step, "step")?.missing()), out_tensors, capacity, out_num)?;
    }

    fn bagua_step_observed_order(
        step: *const StepMachine, out_tensors: *mut usize, capacity: u64, out_num: *mut u64
    ) {
        let order = Some(shared(step, "step")?.observed_order());
        list("out_tensors", order.map(entries), out_tensors, capacity, out_num)?;
    }

    fn bagua_step_agreed_order(
        step: *const StepMachine, out_tensors: *mut usize, capacity: u64, out_num: *mut u64
    ) {
        let order = shared(step, "step")?.agreed_order();
        list("out_tensors", order.map(entries), out_tensors, capacity, out_num)?;
    }

    fn bagua_step_layout_due(
        step: *const StepMachine, out_tensors: *mut usize, capacity: u64, out_num: *mut u64
    ) {
        let order = shared(step, "step")?.layout_due();
        list("out_tensors", order.map(entries), out_tensors, capacity, out_num)?;
    }

    fn bagua_topology_name(topology: u32, out_name: *mut u8, capacity: u64) {
        let name = topology_at(topology)?.name();
        check_capacity("out_name", capacity, name.len() + 1)?;
        fill(output(out_name, name.len() as u64 + 1, "out_name")?, name.bytes().chain(std::iter::once(0)));
    }

    fn bagua_topology_neighbors(
        topology: u32, size: u64, rank: u64, step: u64, out_neighbors: *mut Neighbor, capacity: u64,
        out_num: *mut u64
    ) {
        let found = topology_at(topology)?.neighbors(size as usize, rank as usize, step)?; // as wide, see above
        list("out_neighbors", Some(entries(&found)), out_neighbors, capacity, out_num)?;
    }

    fn bagua_rehearsed_cost(
        steps: *const Step, num_steps: u64, rank: u64, network: *const Network, out_cost: *mut Cost
    ) {
        let out_cost = slot(out_cost, "out_cost")?;
        out_cost.write(cost(input(steps, num_steps, "steps")?, rank, shared(network, "network")?)?);
    }

    fn bagua_play(
        program: *const Entry, num_entries: u64, operations: *const Operation, num_operations: u64, size: u64,
        conditions: *const Conditions, out_step_ends: *mut f64, out_waited: *mut f64, num_step_ends: u64,
        out_begins: *mut f64, out_ends: *mut f64, num_ends: u64
    ) {
        let program = input(program, num_entries, "program")?;
        let operations = input(operations, num_operations, "operations")?;
        let times = play(program, operations, size as usize, *shared(conditions, "conditions")?)?; // as wide
        check_capacity("out_step_ends", num_step_ends, times.step_ends.len())?;
        check_capacity("out_ends", num_ends, times.ends.len())?;
        fill(output(out_step_ends, num_step_ends, "out_step_ends")?, entries(&times.step_ends));
        fill(output(out_waited, num_step_ends, "out_waited")?, entries(&times.waited));
        fill(output(out_begins, num_ends, "out_begins")?, entries(&times.begins));
        fill(output(out_ends, num_ends, "out_ends")?, entries(&times.ends));
    }
}

fn topology_at(topology: u32) -> Result<Topology, Error> {
    let found = TOPOLOGIES.get(topology as usize).copied(); // widens
    found.ok_or(Error::TopologyOutOfRange { topology, num_topologies: TOPOLOGIES.len() })
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
        // SAFETY: not null; two plain stores, which a `ready` can afford.
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

/// The caller's array of `len` entries; null is legal if `len` is 0.
unsafe fn input<'a, T>(pointer: *const T, len: u64, argument: &'static str) -> Result<&'a [T], Error> {
    let num_entries = array_len::<T>(len, argument)?;
    match (num_entries, pointer.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(Error::NullPointer { argument }),
        // SAFETY: not null, size checked; otherwise the header's promise.
        (_, false) => Ok(unsafe { slice::from_raw_parts(pointer, num_entries) }),
    }
}

/// The caller's array of `capacity` entries; null is legal if `capacity` is 0.
unsafe fn output<'a, T>(
    pointer: *mut T,
    capacity: u64,
    argument: &'static str,
) -> Result<&'a mut [MaybeUninit<T>], Error> {
    let capacity = array_len::<T>(capacity, argument)?;
    match (capacity, pointer.is_null()) {
        (0, _) => Ok(&mut []),
        (_, true) => Err(Error::NullPointer { argument }),
        // SAFETY: not null, size checked; MaybeUninit<T> has the layout of T; otherwise the header's
        // promise.
        (_, false) => Ok(unsafe { slice::from_raw_parts_mut(pointer.cast(), capacity) }),
    }
}

/// Writes `entries`, at most as many as `out` has, to its beginning.
fn fill<T>(out: &mut [MaybeUninit<T>], entries: impl Iterator<Item = T>) {
    out.iter_mut().zip(entries).for_each(|(slot, entry)| *slot = MaybeUninit::new(entry));
}

fn check_capacity(argument: &'static str, capacity: u64, required: usize) -> Result<(), Error> {
    let is_enough = capacity >= required as u64;
    is_enough.then_some(()).ok_or(Error::BufferTooSmall { argument, capacity, required })
}

fn entries<T: Copy>(list: &[T]) -> impl Iterator<Item = T> + Clone + '_ {
    list.iter().copied()
}

/// Writes the length of `list` to `out_num`, even if `out` is too short for it, and then the list.
unsafe fn list<T>(
    argument: &'static str,
    list: Option<impl Iterator<Item = T> + Clone>,
    out: *mut T,
    capacity: u64,
    out_num: *mut u64,
) -> Result<(), Error> {
    // SAFETY: the header's promise.
    let out_num = unsafe { slot(out_num, "out_num") }?;
    let list = match list {
        Some(list) => list,
        None => {
            out_num.write(BAGUA_NO_LIST);
            return Ok(());
        }
    };
    let len = list.clone().count();
    out_num.write(len as u64);
    check_capacity(argument, capacity, len)?;
    // SAFETY: the header's promise; as long as checked.
    fill(unsafe { output(out, len as u64, argument) }?, list);
    Ok(())
}

/// `len` as the length of an array of `T`, if an array of that size can exist.
fn array_len<T>(len: u64, argument: &'static str) -> Result<usize, Error> {
    usize::try_from(len)
        .ok()
        .filter(|len| len.checked_mul(size_of::<T>()).map_or(false, |size| size <= isize::MAX as usize))
        .ok_or(Error::ArrayTooLong { argument, len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::align_of;

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

    #[test]
    fn sizes_are_those_of_the_header() {
        assert_eq!((size_of::<BaguaRustError>(), align_of::<BaguaRustError>()), (4 + 256, 4));
        assert_eq!((size_of::<TensorSpec>(), align_of::<TensorSpec>()), (24, 8));
        assert_eq!((size_of::<PlanOptions>(), align_of::<PlanOptions>()), (24, 8));
        assert_eq!((size_of::<Neighbor>(), align_of::<Neighbor>()), (24, 8));
        assert_eq!((size_of::<Step>(), align_of::<Step>()), (32, 8));
        assert_eq!((size_of::<Network>(), align_of::<Network>()), (64, 8));
        assert_eq!((size_of::<Cost>(), align_of::<Cost>()), (24, 8));
        assert_eq!((size_of::<Entry>(), align_of::<Entry>()), (16, 8));
        assert_eq!((size_of::<Operation>(), align_of::<Operation>()), (40, 8));
        assert_eq!((size_of::<Conditions>(), align_of::<Conditions>()), (48, 8));
    }

    #[test]
    fn messages_are_cut_at_a_character_boundary() {
        for character in ["a", "é", "€", "𝄞"] {
            for shift in 0..4 {
                for num_characters in [0, 1, 62, 63, 64, 65, 127, 128, 129, 253, 254, 255, 256, 300] {
                    let message = "x".repeat(shift) + &character.repeat(num_characters);
                    let error = BaguaRustError::new(3, &message);
                    let text = error.text();
                    assert_eq!((error.code, error.message[MESSAGE_BYTES - 1]), (3, 0));
                    assert!(message.starts_with(&text), "{message:?} became {text:?}");
                    let is_longest = text.len() + character.len() > MESSAGE_BYTES - 1;
                    assert!(text == message || is_longest, "{message:?} was cut to {} bytes", text.len());
                }
            }
        }
    }
}
