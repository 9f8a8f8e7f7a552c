//! Bagua's ordering core: pure, deterministic state machines, events in and decisions out.
//!
//! Data path: [`planner`] turns tensor sizes and the order in which they are expected to become
//! ready into buckets; [`step`] turns the events of a training step into decisions, in the same order
//! on every rank; [`topology`] chooses the ranks that average with each other; [`rehearsed`] and
//! [`simulator`] tell how long that takes on a network; [`ffi`] is the C ABI
//! through which the extension module uses them.
//!
//! Invariants: no tensor pointer, no socket, no thread, no clock, no source of randomness; no
//! `unsafe` outside [`ffi`]; std only. The code that runs in training is the code under test.
#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod error;
#[allow(unsafe_code)] // raw pointers from C; nowhere else
pub mod ffi;
pub mod planner;
pub mod rehearsed;
pub mod simulator;
pub mod step;
pub mod topology;
