//! The topologies against their definitions, written out as matrices in plain loops, and their
//! invariants for all sizes up to 33 and many steps.

use bagua_rust::error::ErrorCode;
use bagua_rust::topology::{Neighbor, Topology, TOPOLOGIES};

const STEPS: [u64; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 31, 1 << 20, u64::MAX - 1, u64::MAX];

fn neighbors(topology: Topology, size: usize, rank: usize, step: u64) -> Vec<Neighbor> {
    topology.neighbors(size, rank, step).unwrap()
}

fn matrix(topology: Topology, size: usize, step: u64) -> Vec<Vec<f64>> {
    let mut rows = vec![vec![0.0; size]; size];
    for (rank, row) in rows.iter_mut().enumerate() {
        for neighbor in neighbors(topology, size, rank, step) {
            row[neighbor.rank] += neighbor.weight;
        }
    }
    rows
}

fn for_each_case(mut check: impl FnMut(Topology, usize, u64)) {
    for topology in TOPOLOGIES {
        for size in 1..=33 {
            for step in STEPS {
                check(topology, size, step);
            }
        }
    }
}

#[test]
fn every_matrix_is_doubly_stochastic() {
    for_each_case(|topology, size, step| {
        let rows = matrix(topology, size, step);
        for i in 0..size {
            let row: f64 = rows[i].iter().sum();
            let column: f64 = rows.iter().map(|row| row[i]).sum();
            assert!(rows[i].iter().all(|&weight| weight >= 0.0), "{topology:?} {size} {step}");
            assert!((row - 1.0).abs() < 1e-12 && (column - 1.0).abs() < 1e-12, "{topology:?} {size} {step}");
        }
    });
}

#[test]
fn who_sends_is_who_is_received_from() {
    for_each_case(|topology, size, step| {
        let all: Vec<_> = (0..size).map(|rank| neighbors(topology, size, rank, step)).collect();
        let has = |rank: usize, other: usize, select: fn(&Neighbor) -> bool| {
            all[rank].iter().any(|neighbor| neighbor.rank == other && select(neighbor))
        };
        for (i, row) in all.iter().enumerate() {
            assert!(row.windows(2).all(|pair| pair[0].rank < pair[1].rank), "{topology:?} {size} {step}");
            assert!(has(i, i, |own| !own.is_source && !own.is_target), "{topology:?} {size} {step}");
            for j in 0..size {
                let taken = has(i, j, |neighbor| neighbor.is_source);
                assert_eq!(taken, has(j, i, |neighbor| neighbor.is_target), "{topology:?} {size} {step}");
                assert!(i == j || taken == (matrix_entry(row, j) > 0.0), "{topology:?} {size} {step}");
            }
        }
    });
}

fn matrix_entry(neighbors: &[Neighbor], rank: usize) -> f64 {
    neighbors.iter().find(|neighbor| neighbor.rank == rank).map_or(0.0, |neighbor| neighbor.weight)
}

#[test]
fn all_is_the_mean() {
    for size in 1..=33 {
        let expected = vec![vec![1.0 / size as f64; size]; size];
        assert_eq!(matrix(Topology::All, size, 5), expected);
    }
}

#[test]
fn ring_has_two_neighbours() {
    for size in 3..=33 {
        let rows = matrix(Topology::Ring, size, 9);
        for (i, row) in rows.iter().enumerate() {
            for (j, &weight) in row.iter().enumerate() {
                let is_near = j == i || j == (i + 1) % size || i == (j + 1) % size;
                assert_eq!(weight, if is_near { 1.0 / 3.0 } else { 0.0 });
            }
        }
    }
    assert_eq!(matrix(Topology::Ring, 2, 0), [[0.5, 0.5], [0.5, 0.5]]);
    assert_eq!(matrix(Topology::Ring, 1, 0), [[1.0]]);
}

fn partners(size: usize, step: u64) -> Vec<usize> {
    let partner = |rank| {
        let others = neighbors(Topology::ShiftOne, size, rank, step);
        others.iter().find(|neighbor| neighbor.is_source).map_or(rank, |neighbor| neighbor.rank)
    };
    (0..size).map(partner).collect()
}

#[test]
fn shift_one_of_even_sizes_is_the_published_pairing() {
    assert_eq!(partners(4, 0), [2, 3, 0, 1]);
    assert_eq!(partners(4, 1), [3, 2, 1, 0]);
    for half in 1..=16i128 {
        for step in STEPS {
            let s = i128::from(step);
            let expected: Vec<usize> = (0..2 * half)
                .map(|i| if i < half { (s + i) % half + half } else { (i - half - s).rem_euclid(half) })
                .map(|partner| partner as usize)
                .collect();
            assert_eq!(partners(2 * half as usize, step), expected, "{half} {step}");
        }
    }
}

#[test]
fn shift_one_of_odd_sizes_meets_everybody_once() {
    for size in (1..=33).step_by(2) {
        for rank in 0..size {
            let mut met: Vec<usize> = (0..size as u64).map(|step| partners(size, step)[rank]).collect();
            met.sort_unstable();
            assert_eq!(met, (0..size).collect::<Vec<_>>(), "{size}"); // itself once, in the step without a pair
        }
    }
}

#[test]
fn exponential_of_a_power_of_two_reaches_the_mean() {
    for power in 0..=5u32 {
        let size = 1usize << power;
        for first in [0, 3 * u64::from(power.max(1))] {
            let mut values: Vec<f64> = (0..size).map(|rank| (rank * rank) as f64).collect();
            let mean = values.iter().sum::<f64>() / size as f64;
            for step in first..first + u64::from(power) {
                let rows = matrix(Topology::Exponential, size, step);
                values = rows.iter().map(|row| row.iter().zip(&values).map(|(w, x)| w * x).sum()).collect();
            }
            assert!(values.iter().all(|value| (value - mean).abs() < 1e-9), "{size}: {values:?}");
        }
    }
}

#[test]
fn exponential_takes_from_the_doubled_distance() {
    for size in 2..=33 {
        let mut num_distances = 0;
        while 1 << num_distances < size {
            num_distances += 1;
        }
        for step in 0..12 {
            let distance = 1 << (step % num_distances);
            for rank in 0..size {
                let found = neighbors(Topology::Exponential, size, rank, step);
                let source = found.iter().find(|neighbor| neighbor.is_source).unwrap();
                let target = found.iter().find(|neighbor| neighbor.is_target).unwrap();
                assert_eq!((source.rank + distance) % size, rank);
                assert_eq!((rank + distance) % size, target.rank);
            }
        }
    }
}

#[test]
fn ranks_outside_are_refused() {
    for topology in TOPOLOGIES {
        for (size, rank) in [(0, 0), (1, 1), (4, 4), (4, usize::MAX)] {
            let error = topology.neighbors(size, rank, 0).unwrap_err();
            assert_eq!(error.code(), ErrorCode::RankOutOfRange);
        }
    }
}

#[test]
fn matching_pairs_all_ranks_and_each_pair_alike_often() {
    for size in [2, 5, 6] {
        let mut times = vec![vec![0u32; size]; size];
        let steps = 6000;
        for step in 0..steps {
            let partner = |rank: usize| {
                let found = neighbors(Topology::Matching, size, rank, step);
                found.iter().find(|neighbor| neighbor.is_source).map_or(rank, |neighbor| neighbor.rank)
            };
            let alone = (0..size).filter(|&rank| partner(rank) == rank).count();
            assert_eq!(alone, size % 2, "{size} {step}");
            for rank in 0..size {
                assert_eq!(partner(partner(rank)), rank, "{size} {step}");
                times[rank][partner(rank)] += 1;
            }
        }
        // Each of the n - 1 others (and itself, of an odd n) is as likely: six standard deviations are allowed.
        let choices = (size - 1 + size % 2) as f64;
        let expected = f64::from(steps as u32) / choices;
        for (rank, row) in times.iter().enumerate() {
            for (other, &count) in row.iter().enumerate().filter(|&(other, _)| other != rank || size % 2 == 1)
            {
                let distance = (f64::from(count) - expected).abs();
                assert!(distance <= 6.0 * expected.sqrt(), "{size}: {rank} with {other} {count} times");
            }
        }
    }
}
