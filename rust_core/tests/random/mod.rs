//! A deterministic source of random planning cases for the property tests.
//!
//! Invariants: a case depends on its seed alone, so the seed that a failing test prints is enough
//! to repeat it. The generator is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
//! number generators", 2014).

use bagua_rust::planner::{PlanOptions, TensorSpec};

pub struct SplitMix64(u64);

impl SplitMix64 {
    pub fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `bound`; the bias of the remainder does not matter here.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A random permutation of `0..len` (Fisher and Yates).
    pub fn permutation(&mut self, len: usize) -> Vec<u64> {
        let mut order: Vec<u64> = (0..len as u64).collect();
        for last in (1..len).rev() {
            order.swap(last, self.below(last as u64 + 1) as usize);
        }
        order
    }
}

/// One call of the planner.
#[derive(Debug)]
pub struct Case {
    pub tensors: Vec<TensorSpec>,
    pub order: Vec<u64>,
    pub options: PlanOptions,
}

/// A legal case: few keys, tensors from empty to larger than the cap, caps smaller than the
/// alignment now and then, no tensor at all now and then.
pub fn random_case(random: &mut SplitMix64) -> Case {
    let num_tensors = random.below(24) as usize;
    let num_keys = 1 + random.below(4);
    let item_bytes_of_key: Vec<u32> = (0..num_keys).map(|_| 1 << random.below(4)).collect();
    let max_numel = 1 + random.below(300);
    let tensors = (0..num_tensors)
        .map(|_| {
            let key = random.below(num_keys);
            let numel = if random.below(8) == 0 { 0 } else { random.below(max_numel) };
            TensorSpec { numel, item_bytes: item_bytes_of_key[key as usize], key: key.wrapping_sub(2) }
        })
        .collect();
    let options = PlanOptions {
        small_bucket_bytes: 1 + random.below(800),
        bucket_bytes: 1 + random.below(2000),
        align_bytes: 8 << random.below(5),
    };
    Case { tensors, order: random.permutation(num_tensors), options }
}
