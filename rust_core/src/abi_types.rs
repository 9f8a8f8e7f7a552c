//! The plain structs of the C ABI, as `include/bagua_rust.h` declares them, and their conversions.
//!
//! Data path: `ffi` reads and writes these in the caller's memory.
//!
//! Invariants: `repr(C)`, no pointers, any bit pattern is a valid value; sizes and field offsets
//! are checked on both sides (tests here, `static_assert` in `csrc/bindings/order.cc`). A message
//! always ends with a NUL and is always valid UTF-8.

#![allow(missing_docs)] // fields mean what the Rust types they mirror say

use std::ops::Range;
use std::os::raw::c_char;

use crate::error::Error;
use crate::planner::{Member, PlanOptions, PlannedBucket, TensorSpec};
use crate::topology::Neighbor;

/// Bytes of [`BaguaRustError::message`], the terminating NUL included.
pub const MESSAGE_BYTES: usize = 256;

/// Status and message of one call, in memory of the caller.
#[repr(C)]
#[derive(Clone)]
pub struct BaguaRustError {
    /// An [`ErrorCode`](crate::error::ErrorCode), or 0.
    pub code: i32,
    /// NUL-terminated UTF-8, cut at a character boundary; empty on success.
    pub message: [c_char; MESSAGE_BYTES],
}

impl BaguaRustError {
    /// The error that says `message`, cut to fit.
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

/// [`TensorSpec`] of the planner.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BaguaTensorSpec {
    pub numel: u64,
    pub key: u64,
    pub item_bytes: u32,
}

impl From<&BaguaTensorSpec> for TensorSpec {
    fn from(spec: &BaguaTensorSpec) -> Self {
        TensorSpec { numel: spec.numel, item_bytes: spec.item_bytes, key: spec.key }
    }
}

/// [`PlanOptions`] of the planner.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BaguaPlanOptions {
    pub small_bucket_bytes: u64,
    pub bucket_bytes: u64,
    pub align_bytes: u64,
}

impl From<&BaguaPlanOptions> for PlanOptions {
    fn from(options: &BaguaPlanOptions) -> Self {
        PlanOptions {
            small_bucket_bytes: options.small_bucket_bytes,
            bucket_bytes: options.bucket_bytes,
            align_bytes: options.align_bytes,
        }
    }
}

/// [`PlannedBucket`] without its members.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BaguaBucketInfo {
    pub key: u64,
    pub numel: u64,
    pub num_members: u64,
    pub item_bytes: u32,
}

impl From<&PlannedBucket> for BaguaBucketInfo {
    fn from(bucket: &PlannedBucket) -> Self {
        BaguaBucketInfo {
            key: bucket.key,
            numel: bucket.numel,
            num_members: bucket.members.len() as u64, // widens
            item_bytes: bucket.item_bytes,
        }
    }
}

/// [`Member`] of a bucket.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BaguaBucketMember {
    pub tensor: u64,
    pub offset_numel: u64,
    pub numel: u64,
}

impl From<&Member> for BaguaBucketMember {
    fn from(member: &Member) -> Self {
        let tensor = member.tensor as u64; // widens
        BaguaBucketMember { tensor, offset_numel: member.offset_numel, numel: member.numel }
    }
}

/// Buckets `first..last`, in launch order.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BaguaBucketRange {
    pub first: u64,
    pub last: u64,
}

impl From<Range<usize>> for BaguaBucketRange {
    fn from(range: Range<usize>) -> Self {
        BaguaBucketRange { first: range.start as u64, last: range.end as u64 } // widens
    }
}

/// [`Neighbor`] of a topology.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BaguaNeighbor {
    pub rank: u64,
    pub weight: f64,
    pub is_source: u32,
    pub is_target: u32,
}

impl From<&Neighbor> for BaguaNeighbor {
    fn from(neighbor: &Neighbor) -> Self {
        BaguaNeighbor {
            rank: neighbor.rank as u64, // widens
            weight: neighbor.weight,
            is_source: neighbor.is_source.into(),
            is_target: neighbor.is_target.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, size_of};

    #[test]
    fn sizes_are_those_of_the_header() {
        assert_eq!((size_of::<BaguaRustError>(), align_of::<BaguaRustError>()), (4 + 256, 4));
        assert_eq!((size_of::<BaguaTensorSpec>(), align_of::<BaguaTensorSpec>()), (24, 8));
        assert_eq!((size_of::<BaguaPlanOptions>(), align_of::<BaguaPlanOptions>()), (24, 8));
        assert_eq!((size_of::<BaguaBucketInfo>(), align_of::<BaguaBucketInfo>()), (32, 8));
        assert_eq!((size_of::<BaguaBucketMember>(), align_of::<BaguaBucketMember>()), (24, 8));
        assert_eq!((size_of::<BaguaBucketRange>(), align_of::<BaguaBucketRange>()), (16, 8));
        assert_eq!((size_of::<BaguaNeighbor>(), align_of::<BaguaNeighbor>()), (24, 8));
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
