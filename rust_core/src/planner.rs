//! The bucket planner: tensor sizes and an expected ready order in, bucket layout out.
//!
//! Data path: gradient sizes -> **plan** -> memory (`bagua/buckets.py`) and launch order (`step`).
//!
//! Invariants: this is a pure function, so ranks that pass the same arguments get the same plan; each
//! tensor is in exactly one bucket; tensors of different keys never share a bucket; every offset and
//! every bucket size is a multiple of `align_bytes`; only a bucket with a single member is larger than
//! its cap. The small first bucket is torch DDP's idea (`reducer.cpp`,
//! `compute_bucket_assignment_by_size`); there a bucket closes after passing its cap, here before.
//! Caps double from bucket to bucket, so that the next bucket is complete before the wire is idle;
//! towards the end they halve, since no compute is left to overlap with the last bucket.

use std::collections::{BTreeMap, HashMap};

use crate::error::Error;

/// The planner's input for one tensor. The C ABI has the same struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct TensorSpec {
    /// Number of elements; 0 is legal.
    pub numel: u64,
    /// An opaque class, made by the caller from dtype, device and the algorithm's class.
    pub key: u64,
    /// Size of one element in bytes.
    pub item_bytes: u32,
}

/// The size limits of the plan, in bytes. The C ABI has the same struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct PlanOptions {
    /// The minimum cap, that of the first and the last bucket of a key. If `bucket_bytes` is smaller,
    /// that is the minimum.
    pub small_bucket_bytes: u64,
    /// The maximum cap, padding included.
    pub bucket_bytes: u64,
    /// The alignment of tensors: a power of two and a multiple of every item size.
    pub align_bytes: u64,
}

/// The result of [`plan`]. Each bucket has at least one tensor. Buckets are numbered in launch order,
/// by the position of their last tensor in `order`. A tensor that is earlier in `order` has the lower
/// offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketPlan {
    /// The bucket of each tensor.
    pub bucket_of: Vec<usize>,
    /// The offset of each tensor inside its bucket; that of an empty tensor may be the bucket's end.
    pub offset_numel_of: Vec<u64>,
    /// The number of elements of each bucket, padding included; 0 if all its tensors are empty.
    pub bucket_numels: Vec<u64>,
}

/// Lays `tensors` out in buckets, in `order`, whose first tensor is expected to be ready first.
///
/// One bucket per key is open at a time. It closes when the next tensor of its key would take it
/// past its cap; a single tensor that is larger than the cap closes its bucket at once. The cap is
/// the smaller of two sizes, padding included: the bytes of its key in earlier buckets, and half of
/// its key's other bytes. It is at least `small_bucket_bytes` and at most `bucket_bytes`.
///
/// # Errors
/// `order` is not a permutation; `align_bytes` is not a power of two or not a multiple of an item
/// size; a cap or an item size is 0; item sizes differ within a key; a size passes 64 bits.
///
/// # Example
/// ```
/// use bagua_rust::planner::{plan, PlanOptions, TensorSpec};
/// let f32s = |numel| TensorSpec { numel, item_bytes: 4, key: 0 };
/// let options = PlanOptions { small_bucket_bytes: 64, bucket_bytes: 256, align_bytes: 64 };
/// let plan = plan(&[f32s(20), f32s(10), f32s(3), f32s(20)], &[3, 2, 1, 0], options).unwrap();
/// assert_eq!(plan.bucket_of, [2, 1, 1, 0]); // small, twice as large, half of what is left
/// assert_eq!(plan.offset_numel_of, [0, 16, 0, 0]); // 64 bytes
/// assert_eq!(plan.bucket_numels, [32, 16 + 16, 32]);
/// ```
pub fn plan(tensors: &[TensorSpec], order: &[u64], options: PlanOptions) -> Result<BucketPlan, Error> {
    check_options(options)?;
    check_tensors(tensors, options.align_bytes)?;
    let order = check_order(order, tensors.len())?;

    let mut bucket_of = vec![0; tensors.len()];
    let mut offset_numel_of = vec![0; tensors.len()];
    let mut placed_bytes: HashMap<u64, u64> = HashMap::new();
    let mut left_bytes: HashMap<u64, u64> = HashMap::new();
    for (tensor, spec) in tensors.iter().enumerate() {
        let left = left_bytes.entry(spec.key).or_default();
        *left = left.saturating_add(padded_bytes(tensor, spec, options.align_bytes)?);
    }
    let small_bytes = options.small_bucket_bytes.min(options.bucket_bytes);
    let mut open: BTreeMap<u64, OpenBucket> = BTreeMap::new();
    let mut closed: Vec<OpenBucket> = Vec::new();
    for (position, &tensor) in order.iter().enumerate() {
        let spec = &tensors[tensor];
        let add_bytes = padded_bytes(tensor, spec, options.align_bytes)?;
        if open.get(&spec.key).map_or(false, |bucket| !bucket.fits(add_bytes)) {
            closed.extend(open.remove(&spec.key));
        }
        let placed = placed_bytes.entry(spec.key).or_default();
        let left = left_bytes.entry(spec.key).or_default();
        let bucket = open.entry(spec.key).or_insert_with(|| {
            let cap_bytes = (*placed).min(*left / 2).clamp(small_bytes, options.bucket_bytes);
            OpenBucket { cap_bytes, size_bytes: 0, last_position: 0, tensors: Vec::new() }
        });
        *placed = placed.saturating_add(add_bytes);
        *left = left.saturating_sub(add_bytes);
        // Exact: size_bytes is a multiple of align_bytes, which is a multiple of item_bytes.
        offset_numel_of[tensor] = bucket.size_bytes / u64::from(spec.item_bytes);
        bucket.size_bytes += add_bytes; // no overflow: the bucket is empty or `fits` returned true
        bucket.tensors.push(tensor);
        bucket.last_position = position;
        if bucket.size_bytes > bucket.cap_bytes {
            closed.extend(open.remove(&spec.key));
        }
    }
    closed.extend(open.into_values());
    closed.sort_by_key(|bucket| bucket.last_position); // distinct: a position is in one bucket
    let mut bucket_numels = Vec::with_capacity(closed.len());
    for (index, bucket) in closed.iter().enumerate() {
        bucket.tensors.iter().for_each(|&tensor| bucket_of[tensor] = index);
        let item_bytes = tensors[bucket.tensors[0]].item_bytes; // the same for all; there is at least one
        bucket_numels.push(bucket.size_bytes / u64::from(item_bytes)); // exact, as above
    }
    Ok(BucketPlan { bucket_of, offset_numel_of, bucket_numels })
}

struct OpenBucket {
    cap_bytes: u64,
    size_bytes: u64, // a multiple of align_bytes
    last_position: usize,
    tensors: Vec<usize>,
}

impl OpenBucket {
    fn fits(&self, add_bytes: u64) -> bool {
        // A sum that passes 64 bits passes every cap, so it is not an error here.
        self.size_bytes.checked_add(add_bytes).map_or(false, |size_bytes| size_bytes <= self.cap_bytes)
    }
}

fn padded_bytes(tensor: usize, spec: &TensorSpec, align_bytes: u64) -> Result<u64, Error> {
    let mask = align_bytes - 1; // align_bytes is a power of two
    spec.numel
        .checked_mul(u64::from(spec.item_bytes))
        .and_then(|size_bytes| size_bytes.checked_add(mask))
        .map(|size_bytes| size_bytes & !mask)
        .ok_or(Error::TensorTooLarge { tensor, numel: spec.numel, item_bytes: spec.item_bytes })
}

fn check_options(options: PlanOptions) -> Result<(), Error> {
    if options.small_bucket_bytes == 0 {
        return Err(Error::ZeroBucketBytes { option: "small_bucket_bytes" });
    }
    if options.bucket_bytes == 0 {
        return Err(Error::ZeroBucketBytes { option: "bucket_bytes" });
    }
    if !options.align_bytes.is_power_of_two() {
        return Err(Error::AlignmentNotPowerOfTwo { align_bytes: options.align_bytes });
    }
    Ok(())
}

fn check_tensors(tensors: &[TensorSpec], align_bytes: u64) -> Result<(), Error> {
    let mut item_bytes_of_key: HashMap<u64, u32> = HashMap::new();
    for (tensor, spec) in tensors.iter().enumerate() {
        let item_bytes = spec.item_bytes;
        if item_bytes == 0 {
            return Err(Error::ZeroItemBytes { tensor });
        }
        if align_bytes % u64::from(item_bytes) != 0 {
            return Err(Error::AlignmentNotMultiple { align_bytes, tensor, item_bytes });
        }
        let expected = *item_bytes_of_key.entry(spec.key).or_insert(item_bytes);
        if expected != item_bytes {
            return Err(Error::MixedItemBytes { tensor, item_bytes, key: spec.key, expected });
        }
    }
    Ok(())
}

/// Converts `order` to indices, or returns the error that says where it is no permutation.
pub(crate) fn check_order(order: &[u64], num_tensors: usize) -> Result<Vec<usize>, Error> {
    if order.len() != num_tensors {
        return Err(Error::OrderLength { order_len: order.len(), num_tensors });
    }
    let mut is_seen = vec![false; num_tensors];
    let mut indices = Vec::with_capacity(num_tensors);
    for (position, &entry) in order.iter().enumerate() {
        let tensor = usize::try_from(entry)
            .ok()
            .filter(|&tensor| tensor < num_tensors)
            .ok_or(Error::OrderIndex { position, tensor: entry, num_tensors })?;
        if is_seen[tensor] {
            return Err(Error::OrderRepeats { position, tensor });
        }
        is_seen[tensor] = true;
        indices.push(tensor);
    }
    Ok(indices)
}
