//! The errors of the ordering core: [`Error`] carries the values, [`ErrorCode`] is its stable number
//! on the C ABI.
//!
//! Invariants: a code never changes its meaning and is never reused, even if no error has it any
//! more (8 was "there is no bucket of that index"). Codes 1 to 99 are mistakes of the caller
//! (InvalidArgument in Python), 100 and above are bugs of bagua (InternalError). Each message carries
//! the value, what was expected and what to do, in that order, because the C ABI keeps only its first
//! 255 bytes.

use std::fmt;

/// The stable number of an error on the C ABI; 0 is success. Mirrored in `include/bagua_rust.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum ErrorCode {
    /// A required pointer was null.
    NullPointer = 1,
    /// `order` is not a permutation of the tensor indices.
    InvalidOrder = 2,
    /// `align_bytes` is not a power of two, or not a multiple of an item size.
    InvalidAlignment = 3,
    /// A bucket size limit is zero.
    InvalidBucketBytes = 4,
    /// An item size is zero, or differs within one key.
    InvalidItemBytes = 5,
    /// A size does not fit in 64 bits.
    Overflow = 6,
    /// There is no tensor of that index.
    TensorOutOfRange = 7,
    /// The tensor was already marked ready in this step.
    AlreadyReady = 9,
    /// No step is under way.
    StepNotStarted = 10,
    /// The caller's array is too short for the answer.
    BufferTooSmall = 11,
    /// There is no topology of that number.
    TopologyOutOfRange = 12,
    /// The rank is not below the number of ranks.
    RankOutOfRange = 13,
    /// The buckets of the tensors are not 0, 1, ... with at least one tensor each.
    InvalidBuckets = 14,
    /// No buckets are laid out yet.
    NotLaidOut = 15,
    /// A step is open, but the call needs it closed.
    StepOpen = 16,
    /// The bucket is not the one that was launched or resumed last.
    NotStartedLast = 17,
    /// A network or its ranks are described by a value that is out of range.
    InvalidNetwork = 18,
    /// An operation or a program does what makes no sense.
    InvalidProgram = 19,
    /// A panic was caught: a bug in this library.
    Internal = 100,
}

/// An error of the ordering core, with the values that describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are named after the values in the messages below
pub enum Error {
    NullPointer { argument: &'static str },
    OrderLength { order_len: usize, num_tensors: usize },
    OrderIndex { position: usize, tensor: u64, num_tensors: usize },
    OrderRepeats { position: usize, tensor: usize },
    AlignmentNotPowerOfTwo { align_bytes: u64 },
    AlignmentNotMultiple { align_bytes: u64, tensor: usize, item_bytes: u32 },
    ZeroBucketBytes { option: &'static str },
    ZeroItemBytes { tensor: usize },
    MixedItemBytes { tensor: usize, item_bytes: u32, key: u64, expected: u32 },
    TensorTooLarge { tensor: usize, numel: u64, item_bytes: u32 },
    ArrayTooLong { argument: &'static str, len: u64 },
    TensorOutOfRange { tensor: u64, num_tensors: usize },
    BucketsLength { len: usize, num_tensors: usize },
    BucketTooLarge { tensor: usize, bucket: u64, num_tensors: usize },
    EmptyBucket { bucket: usize, num_buckets: usize },
    AlreadyReady { tensor: usize },
    StepNotStarted { operation: &'static str },
    NotLaidOut,
    StepOpen { operation: &'static str },
    NotStartedLast { bucket: u64, last: Option<usize> },
    BufferTooSmall { argument: &'static str, capacity: u64, required: usize },
    TopologyOutOfRange { topology: u32, num_topologies: usize },
    RankOutOfRange { rank: u64, size: u64 },
    NetworkValue { name: &'static str, value: u64 },
    RanksPerHost { size: u64, ranks_per_host: u64 },
    StepKind { index: usize, kind: u32 },
    StepPeer { index: usize, peer: i32, size: u64 },
    StepAbout { index: usize, about: u64 },
    ProgramEntry { index: usize, action: u32, operation: u32 },
    Internal { panic: String },
}

impl Error {
    /// The stable number of this error.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::NullPointer { .. } => ErrorCode::NullPointer,
            Error::OrderLength { .. } | Error::OrderIndex { .. } | Error::OrderRepeats { .. } => {
                ErrorCode::InvalidOrder
            }
            Error::AlignmentNotPowerOfTwo { .. } | Error::AlignmentNotMultiple { .. } => {
                ErrorCode::InvalidAlignment
            }
            Error::ZeroBucketBytes { .. } => ErrorCode::InvalidBucketBytes,
            Error::ZeroItemBytes { .. } | Error::MixedItemBytes { .. } => ErrorCode::InvalidItemBytes,
            Error::TensorTooLarge { .. } | Error::ArrayTooLong { .. } => ErrorCode::Overflow,
            Error::TensorOutOfRange { .. } => ErrorCode::TensorOutOfRange,
            Error::BucketsLength { .. } | Error::BucketTooLarge { .. } | Error::EmptyBucket { .. } => {
                ErrorCode::InvalidBuckets
            }
            Error::AlreadyReady { .. } => ErrorCode::AlreadyReady,
            Error::StepNotStarted { .. } => ErrorCode::StepNotStarted,
            Error::NotLaidOut => ErrorCode::NotLaidOut,
            Error::StepOpen { .. } => ErrorCode::StepOpen,
            Error::NotStartedLast { .. } => ErrorCode::NotStartedLast,
            Error::BufferTooSmall { .. } => ErrorCode::BufferTooSmall,
            Error::TopologyOutOfRange { .. } => ErrorCode::TopologyOutOfRange,
            Error::RankOutOfRange { .. } => ErrorCode::RankOutOfRange,
            Error::NetworkValue { .. } | Error::RanksPerHost { .. } => ErrorCode::InvalidNetwork,
            Error::StepKind { .. }
            | Error::StepPeer { .. }
            | Error::StepAbout { .. }
            | Error::ProgramEntry { .. } => ErrorCode::InvalidProgram,
            Error::Internal { .. } => ErrorCode::Internal,
        }
    }
}

impl fmt::Display for Error {
    #[rustfmt::skip] // one variant, one message
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NullPointer { argument } => write!(f,
                "{argument} is null; expected a valid pointer; see bagua_rust.h for which pointers may be null"),
            Error::OrderLength { order_len, num_tensors } => write!(f,
                "order has {order_len} entries; expected {num_tensors}, one per tensor; pass a permutation of 0..{num_tensors}"),
            Error::OrderIndex { position, tensor, num_tensors } => write!(f,
                "order[{position}] is {tensor}; expected an index below {num_tensors}; pass a permutation of 0..{num_tensors}"),
            Error::OrderRepeats { position, tensor } => write!(f,
                "order[{position}] is {tensor}, which occurs earlier in order; expected each tensor once; pass a permutation"),
            Error::AlignmentNotPowerOfTwo { align_bytes } => write!(f,
                "align_bytes is {align_bytes}; expected a power of two; pass for example 64"),
            Error::AlignmentNotMultiple { align_bytes, tensor, item_bytes } => write!(f,
                "align_bytes is {align_bytes} but tensor {tensor} has items of {item_bytes} bytes; expected a multiple of every item size; pass a larger power of two"),
            Error::ZeroBucketBytes { option } => write!(f,
                "{option} is 0; expected at least 1 byte; for one tensor per bucket pass 1, for no smaller first bucket pass small_bucket_bytes = bucket_bytes"),
            Error::ZeroItemBytes { tensor } => write!(f,
                "item_bytes of tensor {tensor} is 0; expected the size of one element in bytes; pass for example 4 for float32"),
            Error::MixedItemBytes { tensor, item_bytes, key, expected } => write!(f,
                "tensor {tensor} has items of {item_bytes} bytes but key {key} has items of {expected}; expected one item size per key; give each dtype a key of its own"),
            Error::TensorTooLarge { tensor, numel, item_bytes } => write!(f,
                "tensor {tensor} has {numel} elements of {item_bytes} bytes; expected a padded size below 2^64 bytes; check its shape"),
            Error::ArrayTooLong { argument, len } => write!(f,
                "{argument} has {len} entries; expected an array that fits in memory; check the length passed with it"),
            Error::TensorOutOfRange { tensor, num_tensors } => write!(f,
                "tensor index is {tensor}; expected below {num_tensors}; pass an index into the list that was planned"),
            Error::BucketsLength { len, num_tensors } => write!(f,
                "bucket_of has {len} entries; expected {num_tensors}, one per tensor; pass what the planner returned"),
            Error::BucketTooLarge { tensor, bucket, num_tensors } => write!(f,
                "bucket_of[{tensor}] is {bucket}; expected below {num_tensors}, as each bucket has a tensor; pass what the planner returned"),
            Error::EmptyBucket { bucket, num_buckets } => write!(f,
                "bucket {bucket} of {num_buckets} has no tensor; expected at least one in each; pass what the planner returned"),
            Error::AlreadyReady { tensor } => write!(f,
                "tensor {tensor} is already ready in this step; expected once per step; call begin before a second backward"),
            Error::StepNotStarted { operation } => write!(f,
                "{operation} outside a step; expected between begin and finish; call begin first"),
            Error::NotLaidOut => write!(f,
                "begin without buckets; expected a layout; call lay_out first"),
            Error::StepOpen { operation } => write!(f,
                "{operation} while a step is open; expected none; call finish or abort first"),
            Error::NotStartedLast { bucket, last: Some(last) } => write!(f,
                "bucket {bucket} cannot be suspended; expected {last}, which was launched or resumed last; call suspended before the next decision is taken"),
            Error::NotStartedLast { bucket, last: None } => write!(f,
                "bucket {bucket} cannot be suspended; expected one that was just launched or resumed, and there is none; call suspended before the next decision is taken"),
            Error::BufferTooSmall { argument, capacity, required } => write!(f,
                "{argument} has {capacity} entries; expected at least {required}; pass a longer array"),
            Error::TopologyOutOfRange { topology, num_topologies } => write!(f,
                "topology number is {topology}; expected below {num_topologies}; ask for the names, whose indices are the numbers"),
            Error::RankOutOfRange { rank, size } => write!(f,
                "rank is {rank} of {size} ranks; expected 0 <= rank < size; pass the group's rank and size"),
            Error::NetworkValue { name, value } => write!(f,
                "{name} is {}; expected a finite number, 0 or more, and above 0 for a rate; pass seconds, and bytes per second", f64::from_bits(*value)),
            Error::RanksPerHost { size, ranks_per_host } => write!(f,
                "{size} ranks do not fill hosts of {ranks_per_host}; expected a multiple; pass as many ranks on every host"),
            Error::StepKind { index, kind } => write!(f,
                "step {index} of an operation has the kind {kind}; expected one of the header's; pass what was rehearsed"),
            Error::StepPeer { index, peer, size } => write!(f,
                "step {index} of an operation has the peer {peer}; expected another rank of {size}; pass what was rehearsed"),
            Error::StepAbout { index, about } => write!(f,
                "step {index} of an operation is about step {about}; expected a message before it; pass what was rehearsed"),
            Error::ProgramEntry { index, action, operation } => write!(f,
                "entry {index} of the program has action {action} on operation {operation}; expected an action of the header, and each operation started once, before it is waited for"),
            Error::Internal { panic } => write!(f,
                "panic in the ordering core: {panic}; expected none, this is a bug in bagua; free the handle and report it"),
        }
    }
}

impl std::error::Error for Error {}
