//! Many ranks that run one program in virtual time.
//!
//! Data path: the program of a rank, as production code ran it in a rehearsal -> **here** -> times.
//!
//! A rank has a thread that computes, starts operations and waits for them, a device that computes
//! meanwhile, and a worker that carries operations out in the order in which they were started. All ranks start them in one order ([`crate::step`]
//! and the hooks around the optimizer see to that), so they are played one after the other: O(ranks x
//! entries). An operation of a rank begins when its worker is free, and with it the ranks that it
//! exchanges with have come.

use crate::error::Error;
use crate::topology::TOPOLOGIES;

/// The kinds of [`Entry`]; their indices are their numbers on the C ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The thread computes for `seconds`.
    Compute,
    /// It starts operation `operation`.
    Start,
    /// It waits for it.
    Wait,
    /// A training step ends.
    EndStep,
    /// The rank's device begins with new work now.
    BeginDevice,
    /// The thread waits until the device has worked for `seconds` more, while it did what came before.
    Device,
}

const ACTIONS: [Action; 6] =
    [Action::Compute, Action::Start, Action::Wait, Action::EndStep, Action::BeginDevice, Action::Device];

/// One thing that the thread of every rank does. The C ABI has the same struct.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Entry {
    /// An [`Action`].
    pub action: u32,
    /// The index of what is started or waited for.
    pub operation: u32,
    /// The time of computing.
    pub seconds: f64,
}

/// One operation. The C ABI has the same struct.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Operation {
    /// From the begin of the last of those that take part to the end.
    pub seconds: f64,
    /// The number of a topology, whose neighbours exchange; [`ALL_RANKS`] for all.
    pub topology: u32,
    /// The step of the topology.
    pub step: u64,
    /// Bytes that the link of a rank's host carries in it.
    pub link_bytes: f64,
    /// Processor time in it, which no link shortens.
    pub busy: f64,
}

/// The number in place of a topology's where every rank waits for every other one.
pub const ALL_RANKS: u32 = u32::MAX;

/// The ranks' compute, which may take longer than the program says, and links that save up what they do
/// not carry. The C ABI has the same struct.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Conditions {
    /// The standard deviation of the logarithm of a factor that each rank draws in each step.
    pub sigma: f64,
    /// A number that decides what is drawn.
    pub seed: u64,
    /// One rank that computes `slow_factor` times as long in every step.
    pub slow_rank: u64,
    /// See `slow_rank`; 1 for none.
    pub slow_factor: f64,
    /// Bytes per second of a link.
    pub rate: f64,
    /// Bytes that an idle link saves up at that rate, and carries at once later.
    pub burst: f64,
}

/// When everything took place, in seconds since the begin.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Times {
    /// The end of each step on each rank, step by step.
    pub step_ends: Vec<f64>,
    /// How long its thread has waited in it.
    pub waited: Vec<f64>,
    /// When each operation began on each rank, operation by operation.
    pub begins: Vec<f64>,
    /// When it ended.
    pub ends: Vec<f64>,
}

/// Plays `program` on `size` ranks.
///
/// # Errors
/// An action or operation that there is none of; an operation that is started twice, or waited for before;
/// a time or a factor that is negative or not finite; a topology out of range.
///
/// # Example
/// ```
/// use bagua_rust::simulator::{play, Entry, Operation, Conditions, ALL_RANKS};
/// let entry = |action, seconds| Entry { action, operation: 0, seconds };
/// let program = [entry(0, 1.0), entry(1, 0.0), entry(0, 2.0), entry(2, 0.0), entry(3, 0.0)];
/// let operation = Operation { seconds: 3.0, topology: ALL_RANKS, step: 0, link_bytes: 0.0, busy: 0.0 };
/// let slow = Conditions { sigma: 0.0, seed: 0, slow_rank: 1, slow_factor: 2.0, rate: 1.0, burst: 0.0 };
/// let times = play(&program, &[operation], 2, slow).unwrap();
/// assert_eq!(times.step_ends, [5.0, 6.0]); // rank 1 starts at 2.0 and computes until 6.0
/// assert_eq!(times.waited, [2.0, 0.0]);
/// ```
pub fn play(
    program: &[Entry],
    operations: &[Operation],
    size: usize,
    conditions: Conditions,
) -> Result<Times, Error> {
    let order = check(program, operations, size, conditions)?;
    let mut threads: Vec<Thread> = (0..size).map(|rank| Thread::new(rank as u64, conditions)).collect();
    let mut free_at = vec![0.0_f64; size]; // of the workers
    let mut links = vec![Link { saved: conditions.burst, since: 0.0 }; size]; // of the ranks' hosts
    let unknown = vec![0.0; operations.len() * size];
    let mut times = Times { begins: unknown.clone(), ends: unknown, ..Times::default() };
    for &operation in &order {
        let ends = &times.ends;
        let ready: Vec<f64> = (0..size)
            .map(|rank| {
                let end_of = |waited: usize| ends[waited * size + rank];
                threads[rank].run(program, Some(operation), end_of).max(free_at[rank])
            })
            .collect();
        let about = operations[operation];
        let begins = begins(&ready, about)?;
        for (rank, &begin) in begins.iter().enumerate() {
            free_at[rank] = begin + links[rank].carry(begin, about, conditions);
        }
        let place = operation * size..(operation + 1) * size;
        times.ends[place.clone()].copy_from_slice(&free_at);
        times.begins[place].copy_from_slice(&begins);
    }
    for (rank, thread) in threads.iter_mut().enumerate() {
        thread.run(program, None, |waited| times.ends[waited * size + rank]);
    }
    let num_steps = threads.first().map_or(0, |thread| thread.step_ends.len());
    for step in 0..num_steps {
        times.step_ends.extend(threads.iter().map(|thread| thread.step_ends[step]));
        times.waited.extend(threads.iter().map(|thread| thread.waited[step]));
    }
    Ok(times)
}

/// When each rank begins, from when it has come.
fn begins(ready: &[f64], operation: Operation) -> Result<Vec<f64>, Error> {
    if operation.topology == ALL_RANKS {
        let last = ready.iter().copied().fold(0.0, f64::max);
        return Ok(vec![last; ready.len()]);
    }
    let topology = TOPOLOGIES[operation.topology as usize]; // checked
    let begin = |rank: usize| {
        let neighbors = topology.neighbors(ready.len(), rank, operation.step)?;
        Ok(neighbors.iter().map(|neighbor| ready[neighbor.rank]).fold(0.0, f64::max))
    };
    (0..ready.len()).map(begin).collect()
}

/// Returns the operations in the order in which they are started.
fn check(
    program: &[Entry],
    operations: &[Operation],
    size: usize,
    conditions: Conditions,
) -> Result<Vec<usize>, Error> {
    let is_time = |value: f64| value >= 0.0 && value.is_finite();
    let values = [
        ("sigma", conditions.sigma),
        ("slow_factor", conditions.slow_factor),
        ("rate", conditions.rate),
        ("burst", conditions.burst),
    ];
    for (name, value) in values {
        if !is_time(value) {
            return Err(Error::NetworkValue { name, value: value.to_bits() });
        }
    }
    if size == 0 || conditions.slow_rank >= size as u64 {
        return Err(Error::RankOutOfRange { rank: conditions.slow_rank, size: size as u64 });
    }
    for operation in operations {
        for (name, value) in
            [("seconds", operation.seconds), ("link_bytes", operation.link_bytes), ("busy", operation.busy)]
        {
            if !is_time(value) {
                return Err(Error::NetworkValue { name, value: value.to_bits() });
            }
        }
        if operation.topology != ALL_RANKS && operation.topology as usize >= TOPOLOGIES.len() {
            let num_topologies = TOPOLOGIES.len();
            return Err(Error::TopologyOutOfRange { topology: operation.topology, num_topologies });
        }
    }
    let mut order = Vec::with_capacity(operations.len());
    let mut is_started = vec![false; operations.len()];
    for (index, entry) in program.iter().enumerate() {
        let wrong = Error::ProgramEntry { index, action: entry.action, operation: entry.operation };
        let operation = entry.operation as usize;
        match ACTIONS.get(entry.action as usize) {
            Some(Action::Compute | Action::Device) if is_time(entry.seconds) => {}
            Some(Action::EndStep | Action::BeginDevice) => {}
            Some(Action::Start) if is_started.get(operation) == Some(&false) => {
                is_started[operation] = true;
                order.push(operation);
            }
            Some(Action::Wait) if is_started.get(operation) == Some(&true) => {}
            _ => return Err(wrong),
        }
    }
    if let Some(operation) = is_started.iter().position(|&is_started| !is_started) {
        return Err(Error::ProgramEntry { index: program.len(), action: 1, operation: operation as u32 });
    }
    Ok(order)
}

/// A link as a token bucket.
#[derive(Clone, Copy)]
struct Link {
    saved: f64, // bytes
    since: f64,
}

impl Link {
    /// Returns the seconds of an operation that begins at `begin`, less what was saved.
    fn carry(&mut self, begin: f64, operation: Operation, conditions: Conditions) -> f64 {
        let Conditions { rate, burst, .. } = conditions;
        if burst == 0.0 || operation.link_bytes == 0.0 {
            return operation.seconds;
        }
        let saved = burst.min(self.saved + (begin - self.since) * rate);
        let seconds = (operation.seconds - saved.min(operation.link_bytes) / rate).max(operation.busy);
        self.saved = burst.min(saved + seconds * rate - operation.link_bytes).max(0.0);
        self.since = begin + seconds;
        seconds
    }
}

/// The thread of one rank.
struct Thread {
    rank: u64,
    conditions: Conditions,
    next: usize,
    now: f64,
    device_free: f64,
    waits: f64,
    step_ends: Vec<f64>,
    waited: Vec<f64>,
}

impl Thread {
    fn new(rank: u64, conditions: Conditions) -> Self {
        Thread {
            rank,
            conditions,
            next: 0,
            now: 0.0,
            device_free: 0.0,
            waits: 0.0,
            step_ends: Vec::new(),
            waited: Vec::new(),
        }
    }

    /// Runs until it has started `operation`, or to the end; returns the time.
    fn run(&mut self, program: &[Entry], operation: Option<usize>, end_of: impl Fn(usize) -> f64) -> f64 {
        while let Some(entry) = program.get(self.next) {
            self.next += 1;
            match ACTIONS[entry.action as usize] {
                Action::Compute => self.now += entry.seconds * self.factor(),
                Action::BeginDevice => self.device_free = self.now,
                Action::Device => {
                    self.device_free += entry.seconds * self.factor();
                    self.now = self.now.max(self.device_free);
                }
                Action::Start => {
                    if operation == Some(entry.operation as usize) {
                        return self.now;
                    }
                }
                Action::Wait => {
                    let end = end_of(entry.operation as usize);
                    self.waits += (end - self.now).max(0.0);
                    self.now = self.now.max(end);
                }
                Action::EndStep => {
                    self.step_ends.push(self.now);
                    self.waited.push(std::mem::take(&mut self.waits));
                }
            }
        }
        self.now
    }

    /// How many times as long this rank computes in this step.
    fn factor(&self) -> f64 {
        let is_slow = self.rank == self.conditions.slow_rank;
        let own = if is_slow { self.conditions.slow_factor } else { 1.0 };
        if self.conditions.sigma == 0.0 {
            return own;
        }
        // Box and Muller's normal number, of two that rank and step draw.
        let place = self.rank.wrapping_mul(0x1_0000_0001).wrapping_add(self.step_ends.len() as u64);
        let uniform = |which: u64| {
            let mixed = mix(self.conditions.seed ^ mix(2 * place + which));
            ((mixed >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
        };
        let normal = (-2.0 * uniform(0).ln()).sqrt() * (std::f64::consts::TAU * uniform(1)).cos();
        own * (self.conditions.sigma * normal).exp()
    }
}

/// splitmix64
fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
