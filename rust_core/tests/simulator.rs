//! The cost of an operation by hand, and the player against its definition, written as a recursion over
//! single events.

#[allow(dead_code)] // the planner's cases
mod random;

use bagua_rust::error::ErrorCode;
use bagua_rust::rehearsed::{cost, Network, Step};
use bagua_rust::simulator::{play, Conditions, Entry, Operation, ALL_RANKS};
use bagua_rust::topology::TOPOLOGIES;

const NONE: u64 = u64::MAX;
const NETWORK: Network = Network {
    size: 4,
    ranks_per_host: 1,
    up: 1000.0,
    down: 500.0,
    latency: 0.5,
    local: 1e9,
    per_message: 0.0,
    slowdown: 1.0,
};
const NOBODY_LATE: Conditions =
    Conditions { sigma: 0.0, seed: 0, slow_rank: 0, slow_factor: 1.0, rate: 1.0, burst: 0.0 };

fn message(kind: u32, peer: i32, bytes: u64, about: u64) -> Step {
    Step { kind, peer, bytes, about, busy_ns: 0 }
}

fn wait(about: u64) -> Step {
    message(2, -1, 0, about)
}

fn seconds(steps: &[Step], network: Network) -> f64 {
    cost(steps, 0, &network).unwrap().seconds
}

#[test]
fn a_message_takes_the_slower_direction_and_the_latency() {
    let steps = [message(1, 3, 100, 1), message(0, 1, 100, 0), wait(0), wait(1)];
    assert_eq!(seconds(&steps, NETWORK), 0.2 + 0.5); // 100 bytes come at 500 a second
    assert_eq!(seconds(&steps, Network { down: 2000.0, ..NETWORK }), 0.1 + 0.5); // and leave at 1000
    assert_eq!(cost(&steps, 0, &NETWORK).unwrap().link_bytes, 100.0);
}

#[test]
fn messages_follow_one_another_on_the_link() {
    let exchange = |peer: i32, at: u64| [message(1, 4 - peer, 100, at + 1), message(0, peer, 100, at)];
    let steps: Vec<Step> =
        (1..4).flat_map(|peer| exchange(peer, 2 * (peer as u64 - 1))).chain((0..6).map(wait)).collect();
    assert_eq!(seconds(&steps, NETWORK), 3.0 * 0.2 + 0.5);
}

#[test]
fn a_pipeline_overlaps_what_it_computes_with_what_travels() {
    // Two chunks of 100 bytes and 0.2 s on the link; each is computed on for 0.3 s after it has come.
    let computing = |step: Step| Step { busy_ns: 300_000_000, ..step };
    let steps = [
        message(1, 3, 100, 1),
        message(0, 1, 100, 0),
        message(1, 3, 100, 3),
        message(0, 1, 100, 2),
        wait(0),
        computing(wait(2)),
        computing(message(3, -1, 0, NONE)),
    ];
    // The first is there at 0.7, the second at 0.9, while the first is computed on.
    let expected = 0.7 + 0.3 + 0.3;
    assert!((seconds(&steps, NETWORK) - expected).abs() < 1e-12);
    let slow = Network { slowdown: 2.0, per_message: 0.01, ..NETWORK };
    assert!((seconds(&steps, slow) - (0.02 + 0.7 + 0.6 + 0.6)).abs() < 1e-12);
    assert!((cost(&steps, 0, &slow).unwrap().busy - 1.24).abs() < 1e-12);
}

#[test]
fn the_ranks_of_a_host_share_its_link() {
    let network = Network { size: 8, ranks_per_host: 4, local: 2000.0, ..NETWORK };
    let to = |distance: i32| {
        let steps = [message(1, 8 - distance, 100, 1), message(0, distance, 100, 0), wait(0), wait(1)];
        cost(&steps, 0, &network).unwrap()
    };
    // To the next rank one of four leaves the host, to the fourth all do.
    assert_eq!((to(1).seconds, to(1).link_bytes), (0.2 + 0.5, 100.0));
    assert_eq!((to(4).seconds, to(4).link_bytes), (0.8 + 0.5, 400.0));
    // Pairs: of ranks 0 and 1 on one host; of 0 and 5, and all others of the host, on two.
    let pair = |peer: i32| {
        let steps = [message(1, peer, 100, 1), message(0, peer, 100, 0), wait(0), wait(1)];
        cost(&steps, 0, &network).unwrap().link_bytes
    };
    assert_eq!((pair(1), pair(5)), (0.0, 400.0));
    // All on one host: 400 bytes through its memory.
    let steps = [message(1, 3, 100, 1), message(0, 1, 100, 0), wait(0), wait(1)];
    let here = cost(&steps, 0, &Network { size: 4, ..network }).unwrap();
    assert_eq!((here.seconds, here.link_bytes), (0.2, 0.0));
}

#[test]
fn a_message_without_a_partner_begins_when_it_is_awaited_and_its_arrival_counts() {
    let steps = [message(1, 2, 100, NONE), wait(0), message(0, 2, 50, NONE), wait(2)];
    assert_eq!(seconds(&steps, NETWORK), 0.2 + 0.5 + 0.05 + 0.5);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let code = |steps: &[Step], network: Network| cost(steps, 0, &network).unwrap_err().code();
    let good = [message(0, 1, 1, NONE)];
    for network in [
        Network { up: 0.0, ..NETWORK },
        Network { latency: -1.0, ..NETWORK },
        Network { slowdown: f64::NAN, ..NETWORK },
        Network { ranks_per_host: 3, ..NETWORK },
        Network { ranks_per_host: 0, ..NETWORK },
    ] {
        assert_eq!(code(&good, network), ErrorCode::InvalidNetwork);
    }
    for bad in
        [message(9, 1, 1, NONE), message(0, 0, 1, NONE), message(0, 4, 1, NONE), message(0, -1, 1, NONE)]
    {
        assert_eq!(code(&[bad], NETWORK), ErrorCode::InvalidProgram);
    }
    for bad in [wait(0), wait(1), wait(NONE)] {
        assert_eq!(code(&[bad], NETWORK), ErrorCode::InvalidProgram);
    }
    assert_eq!(cost(&good, 4, &NETWORK).unwrap_err().code(), ErrorCode::RankOutOfRange);
}

// ---- the player

/// The definition: every time from the times that it depends on, by looking at the program alone.
struct Oracle<'a> {
    program: &'a [Entry],
    operations: &'a [Operation],
    size: usize,
    slow: Conditions,
}

impl Oracle<'_> {
    fn factor(&self, rank: usize) -> f64 {
        if rank as u64 == self.slow.slow_rank {
            self.slow.slow_factor
        } else {
            1.0
        }
    }

    /// The thread's time before entry `until`, and that of its device.
    fn thread(&self, rank: usize, until: usize) -> (f64, f64) {
        let (mut now, mut device) = (0.0_f64, 0.0_f64);
        for entry in &self.program[..until] {
            match entry.action {
                0 => now += entry.seconds * self.factor(rank),
                2 => now = now.max(self.end(entry.operation as usize, rank)),
                4 => device = now,
                5 => {
                    device += entry.seconds * self.factor(rank);
                    now = now.max(device);
                }
                _ => {}
            }
        }
        (now, device)
    }

    fn ready(&self, operation: usize, rank: usize) -> f64 {
        let is_start = |entry: &Entry| entry.action == 1 && entry.operation as usize == operation;
        let place = self.program.iter().position(is_start).unwrap();
        let before = self.program[..place].iter().rev().find(|entry| entry.action == 1);
        let worker = before.map_or(0.0, |entry| self.end(entry.operation as usize, rank));
        self.thread(rank, place).0.max(worker)
    }

    fn end(&self, operation: usize, rank: usize) -> f64 {
        let about = self.operations[operation];
        let partners: Vec<usize> = match TOPOLOGIES.get(about.topology as usize) {
            None => (0..self.size).collect(),
            Some(topology) => {
                topology.neighbors(self.size, rank, about.step).unwrap().iter().map(|one| one.rank).collect()
            }
        };
        partners.iter().map(|&partner| self.ready(operation, partner)).fold(0.0, f64::max) + about.seconds
    }
}

#[test]
fn times_are_those_of_the_definition() {
    let entry = |action, operation, seconds| Entry { action, operation, seconds };
    for seed in 0..40 {
        let mut random = random::SplitMix64::new(seed);
        let size = 1 + random.below(4) as usize;
        let num_operations = 1 + random.below(4) as u32;
        let mut program = vec![entry(4, 0, 0.0)];
        let mut operations = Vec::new();
        for operation in 0..num_operations {
            program.push(entry(5, 0, random.below(8) as f64));
            program.push(entry(0, 0, random.below(3) as f64));
            program.push(entry(1, operation, 0.0));
            let topology = [ALL_RANKS, 1, 2, 3, 4][random.below(5) as usize];
            operations.push(Operation {
                seconds: random.below(9) as f64,
                topology,
                step: random.below(9),
                link_bytes: 0.0,
                busy: 0.0,
            });
            if random.below(2) == 0 {
                program.push(entry(2, random.below(u64::from(operation) + 1) as u32, 0.0));
                program.push(entry(4, 0, 0.0));
            }
        }
        program.push(entry(3, 0, 0.0));
        let slow = Conditions { slow_rank: random.below(size as u64), slow_factor: 3.0, ..NOBODY_LATE };
        let times = play(&program, &operations, size, slow).unwrap();
        let oracle = Oracle { program: &program, operations: &operations, size, slow };
        for rank in 0..size {
            assert_eq!(times.step_ends[rank], oracle.thread(rank, program.len()).0, "seed {seed}");
            for (operation, about) in operations.iter().enumerate() {
                let end = oracle.end(operation, rank);
                assert_eq!(times.ends[operation * size + rank], end, "seed {seed}");
                assert_eq!(times.begins[operation * size + rank], end - about.seconds);
            }
        }
    }
}

/// Each computes, starts an operation and waits for it.
fn two_steps(compute: f64) -> Vec<Entry> {
    let step = |operation| {
        let entry = |action, seconds| Entry { action, operation, seconds };
        [entry(0, compute), entry(1, 0.0), entry(2, 0.0), entry(3, 0.0)]
    };
    (0..2).flat_map(step).collect()
}

#[test]
fn a_slow_rank_holds_up_its_neighbours_alone() {
    let program = two_steps(1.0);
    let ring = Operation { seconds: 0.0, topology: 1, step: 0, link_bytes: 0.0, busy: 0.0 };
    let slow = Conditions { slow_rank: 0, slow_factor: 5.0, ..NOBODY_LATE };
    let times = play(&program, &[ring, ring], 6, slow).unwrap();
    assert_eq!(times.step_ends[..6], [5.0, 5.0, 1.0, 1.0, 1.0, 5.0]);
    assert_eq!(times.step_ends[6..], [10.0, 10.0, 6.0, 2.0, 6.0, 10.0]);
    assert_eq!(times.waited[..6], [0.0, 4.0, 0.0, 0.0, 0.0, 4.0]);
}

#[test]
fn an_idle_link_saves_up() {
    // A step computes for 2 s and exchanges 30 bytes at 10 a second; what is saved, 15 at most, goes at once.
    let program = two_steps(2.0);
    let operation = Operation { seconds: 3.5, topology: ALL_RANKS, step: 0, link_bytes: 30.0, busy: 1.0 };
    let ends = |burst| {
        let conditions = Conditions { rate: 10.0, burst, ..NOBODY_LATE };
        play(&program, &[operation, operation], 1, conditions).unwrap().step_ends
    };
    assert_eq!(ends(0.0), [5.5, 11.0]);
    // 1.5 s less; of the 0.5 s without the wire 5 bytes are saved, and 15 again after two idle seconds.
    assert_eq!(ends(15.0), [4.0, 8.0]);
    // All are there at first, but its processor takes a second; and 70 + 10 + 20 later.
    assert_eq!(ends(100.0), [3.0, 6.0]);
}

#[test]
fn drawn_factors_have_the_spread_that_was_asked_for() {
    let program: Vec<Entry> = (0..500)
        .flat_map(|_| [(0, 1.0), (3, 0.0)])
        .map(|(action, seconds)| Entry { action, operation: 0, seconds })
        .collect();
    let draw =
        |seed| play(&program, &[], 20, Conditions { sigma: 0.2, seed, ..NOBODY_LATE }).unwrap().step_ends;
    let ends = draw(1);
    assert!(ends == draw(1) && ends != draw(2));
    let logs: Vec<f64> = (20..ends.len()).map(|index| (ends[index] - ends[index - 20]).ln()).collect();
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    let deviation = (logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / logs.len() as f64).sqrt();
    assert!(mean.abs() < 0.01 && (deviation - 0.2).abs() < 0.01, "{mean} {deviation}");
}

#[test]
fn programs_that_make_no_sense_are_refused() {
    let entry = |action, operation, seconds| Entry { action, operation, seconds };
    let operation = Operation { seconds: 1.0, topology: ALL_RANKS, step: 0, link_bytes: 0.0, busy: 0.0 };
    let code = |program: &[Entry], operations: &[Operation], size, slow| {
        play(program, operations, size, slow).unwrap_err().code()
    };
    let start = entry(1, 0, 0.0);
    for program in [
        vec![entry(2, 0, 0.0), start],
        vec![start, start],
        vec![entry(1, 1, 0.0), start],
        vec![entry(9, 0, 0.0), start],
        vec![entry(0, 0, -1.0), start],
        vec![],
    ] {
        assert_eq!(code(&program, &[operation], 2, NOBODY_LATE), ErrorCode::InvalidProgram);
    }
    let unknown = Operation { topology: 77, ..operation };
    assert_eq!(code(&[start], &[unknown], 2, NOBODY_LATE), ErrorCode::TopologyOutOfRange);
    let nobody = Conditions { slow_rank: 2, ..NOBODY_LATE };
    assert_eq!(code(&[start], &[operation], 2, nobody), ErrorCode::RankOutOfRange);
    let late = Operation { seconds: f64::INFINITY, ..operation };
    assert_eq!(code(&[start], &[late], 2, NOBODY_LATE), ErrorCode::InvalidNetwork);
    let bad = Conditions { sigma: -1.0, ..NOBODY_LATE };
    assert_eq!(code(&[start], &[operation], 2, bad), ErrorCode::InvalidNetwork);
    assert_eq!(code(&[start], &[operation], 0, NOBODY_LATE), ErrorCode::RankOutOfRange);
}
