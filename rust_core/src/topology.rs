//! The neighbours with which each rank averages in decentralised communication, and their weights.
//!
//! Data path: algorithm -> topology, step -> **neighbourhood** -> `collectives/neighbor_average`.
//!
//! Invariants: a topology is a matrix W per step, `W[i][j]` being the weight with which rank i takes
//! rank j's values. Every W is doubly stochastic (entries >= 0, rows and columns add up to 1), so an
//! averaging keeps the mean over ranks. Rank i sends to j exactly where j takes from i. Pure: all
//! ranks that pass the same size and step agree without a message.

use crate::error::Error;

/// The topologies, by the names that users pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// All ranks with all ranks, weight 1/n.
    All,
    /// Left and right neighbour and self, 1/3 each; two ranks: 1/2 each.
    Ring,
    /// Disjoint pairs, 1/2 each, with another pairing at each step. Even n: rank i < n/2 is paired
    /// with ((s + i) mod n/2) + n/2 at step s (the pairing of the original Bagua); after n/2 steps it
    /// was paired with the whole other half. Odd n: ranks with i + j = s mod n are paired, as in a
    /// round-robin tournament, and the rank with 2i = s mod n keeps its values; after n steps all
    /// ranks were paired once with each other.
    ShiftOne,
    /// At step s each rank averages with the rank 2^(s mod ceil(log2 n)) before it, 1/2 each, and
    /// sends to the rank as far after it. If n is a power of two, log2 n steps give the exact mean.
    /// Source: the one-peer exponential graph of arXiv 2110.13363.
    Exponential,
    /// Disjoint pairs, 1/2 each, by a permutation of the ranks that the step alone draws: its first rank
    /// with its second, and so on. Odd n: the last one keeps its values. Source: NoLoCo, arXiv 2506.10911.
    Matching,
}

/// All topologies; their indices are their numbers on the C ABI.
pub const TOPOLOGIES: [Topology; 5] =
    [Topology::All, Topology::Ring, Topology::ShiftOne, Topology::Exponential, Topology::Matching];

/// One rank of a neighbourhood. The C ABI has the same struct.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Neighbor {
    /// Its rank in the group.
    pub rank: usize,
    /// The weight of its values in this rank's average; 0 if they are not received.
    pub weight: f64,
    /// True if its values are received; false for the own rank.
    pub is_source: bool,
    /// True if this rank's values are sent to it; false for the own rank.
    pub is_target: bool,
}

impl Topology {
    /// The name that users pass.
    pub fn name(self) -> &'static str {
        match self {
            Topology::All => "all",
            Topology::Ring => "ring",
            Topology::ShiftOne => "shift_one",
            Topology::Exponential => "exponential",
            Topology::Matching => "matching",
        }
    }

    /// Returns the ranks that `rank` of `size` ranks averages with at `step`, itself included, ascending.
    /// Their weights add up to 1.
    ///
    /// # Errors
    /// `size` is 0, or `rank` is not below it.
    ///
    /// # Example
    /// ```
    /// use bagua_rust::topology::Topology;
    /// let partner = |step| Topology::ShiftOne.neighbors(4, 0, step).unwrap()[1].rank;
    /// assert_eq!([partner(0), partner(1), partner(2)], [2, 3, 2]);
    /// ```
    pub fn neighbors(self, size: usize, rank: usize, step: u64) -> Result<Vec<Neighbor>, Error> {
        if rank >= size {
            return Err(Error::RankOutOfRange { rank: rank as u64, size: size as u64 });
        }
        Ok(match self {
            Topology::All => average(rank, 0..size),
            Topology::Ring => average(rank, [(rank + size - 1) % size, rank, (rank + 1) % size]),
            Topology::ShiftOne => average(rank, [rank, shift_one_partner(size, rank, step)]),
            Topology::Exponential => exponential(size, rank, step),
            Topology::Matching => average(rank, [rank, matching_partner(size, rank, step)]),
        })
    }
}

/// Gives the same weight to each distinct rank of `members`, which all send to each other.
fn average(own: usize, members: impl IntoIterator<Item = usize>) -> Vec<Neighbor> {
    let mut ranks: Vec<usize> = members.into_iter().collect();
    ranks.sort_unstable();
    ranks.dedup();
    let weight = 1.0 / ranks.len() as f64;
    let other = |rank: usize| rank != own;
    ranks
        .into_iter()
        .map(|rank| Neighbor { rank, weight, is_source: other(rank), is_target: other(rank) })
        .collect()
}

fn shift_one_partner(size: usize, rank: usize, step: u64) -> usize {
    let reduced = |modulus: usize| (step % modulus as u64) as usize; // below modulus, which is a usize
    if size % 2 == 1 {
        return (reduced(size) + size - rank) % size;
    }
    let half = size / 2;
    if rank < half {
        (reduced(half) + rank) % half + half
    } else {
        (rank - reduced(half)) % half
    }
}

fn matching_partner(size: usize, rank: usize, step: u64) -> usize {
    let mut order: Vec<usize> = (0..size).collect();
    let mut state = step;
    for last in (1..size).rev() {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        order.swap(last, (mixed % (last as u64 + 1)) as usize); // at most last, which is a usize
    }
    let position = order.iter().position(|&other| other == rank).unwrap_or(rank);
    *order.get(position ^ 1).unwrap_or(&rank)
}

fn exponential(size: usize, rank: usize, step: u64) -> Vec<Neighbor> {
    let num_distances = u64::from(size.next_power_of_two().trailing_zeros());
    if num_distances == 0 {
        return average(rank, [rank]);
    }
    let distance = 1 << (step % num_distances); // below size
    let source = (rank + size - distance) % size;
    let target = (rank + distance) % size;
    let mut neighbors = vec![
        Neighbor { rank, weight: 0.5, is_source: false, is_target: false },
        Neighbor { rank: source, weight: 0.5, is_source: true, is_target: source == target },
    ];
    if source != target {
        neighbors.push(Neighbor { rank: target, weight: 0.0, is_source: false, is_target: true });
    }
    neighbors.sort_unstable_by_key(|neighbor| neighbor.rank);
    neighbors
}
