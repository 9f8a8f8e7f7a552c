//! The time that a rehearsed operation would take on a network.
//!
//! Data path: `csrc/communicator/rehearsal.cc` -> steps of one rank -> **here** -> seconds.
//!
//! The rank stands for all: the others are taken to do the same at the same time, each with the ranks
//! at the same distance around the group. So a message that it receives was posted when it posted the
//! one that stands in its place, and a host's link carries what all its ranks send to a distance.
//! Bytes of one direction of a link leave one after the other, in the order in which they were posted.

use crate::error::Error;

/// The kinds of [`Step`]; their indices are their numbers on the C ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A message to `peer` was posted.
    Send,
    /// A message from `peer` was.
    Receive,
    /// The thread waited for the message of step `about`.
    Wait,
    /// The operation ended.
    End,
}

const KINDS: [Kind; 4] = [Kind::Send, Kind::Receive, Kind::Wait, Kind::End];

/// One thing that an operation did, in its order. The C ABI has the same struct.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Step {
    /// A [`Kind`].
    pub kind: u32,
    /// The other rank of a message.
    pub peer: i32,
    /// The length of a message.
    pub bytes: u64,
    /// The step that a message stands in the place of, or the message that a wait is for; `u64::MAX` for none.
    pub about: u64,
    /// Processor time since the step before.
    pub busy_ns: i64,
}

/// Hosts of equal links, with as many consecutive ranks on each. The C ABI has the same struct.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Network {
    /// Ranks of all hosts together.
    pub size: u64,
    /// Ranks of a host.
    pub ranks_per_host: u64,
    /// Bytes per second that a host's link carries out, payload alone.
    pub up: f64,
    /// The same of what it carries in.
    pub down: f64,
    /// Seconds from the last byte of a message on the link to its arrival.
    pub latency: f64,
    /// Bytes per second between ranks of one host, those of all its ranks together.
    pub local: f64,
    /// Seconds of processor time that each message costs its rank, at either end.
    pub per_message: f64,
    /// How many times as long the ranks compute as the one that rehearsed.
    pub slowdown: f64,
}

impl Network {
    /// Ranks of a host whose message to a rank at `distance` around the group leaves the host. In an
    /// exchange of pairs all do, or none.
    fn crossing(&self, distance: u64, is_pair: bool, rank: u64) -> f64 {
        let host = |rank: u64| rank / self.ranks_per_host;
        if self.size == self.ranks_per_host || is_pair && host((rank + distance) % self.size) == host(rank) {
            return 0.0;
        }
        if is_pair {
            return self.ranks_per_host as f64;
        }
        distance.min(self.size - distance).min(self.ranks_per_host) as f64
    }

    fn check(&self) -> Result<(), Error> {
        let names = ["up", "down", "latency", "local", "per_message", "slowdown"];
        let values = [self.up, self.down, self.latency, self.local, self.per_message, self.slowdown];
        for (name, value) in names.into_iter().zip(values) {
            let is_rate = matches!(name, "up" | "down" | "local");
            if !(value >= 0.0 && value.is_finite() && (value > 0.0 || !is_rate)) {
                return Err(Error::NetworkValue { name, value: value.to_bits() });
            }
        }
        if self.ranks_per_host == 0 || self.size % self.ranks_per_host != 0 {
            return Err(Error::RanksPerHost { size: self.size, ranks_per_host: self.ranks_per_host });
        }
        Ok(())
    }
}

/// The cost of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct Cost {
    /// From the first rank's begin, if all begin together, to the end.
    pub seconds: f64,
    /// The part that is processor time of the thread.
    pub busy: f64,
    /// Bytes that a host's link carries out.
    pub link_bytes: f64,
}

/// Returns the cost of `steps`, which `rank` has rehearsed.
///
/// # Errors
/// A value of the network is out of range; the ranks do not fill their hosts; a peer is no other rank; a
/// step is about one that is none before it.
///
/// # Example
/// ```
/// use bagua_rust::rehearsed::{cost, Network, Step};
/// let none = u64::MAX;
/// let step = |kind, about| Step { kind, peer: 1, bytes: 1000, about, busy_ns: 0 };
/// let steps = [step(1, 1), step(0, 0), step(2, 0), step(2, 1), Step { kind: 3, ..step(3, none) }];
/// let network = Network {
///     size: 2, ranks_per_host: 1, up: 1e6, down: 1e6, latency: 0.25, local: 1e9, per_message: 0.0, slowdown: 1.0,
/// };
/// assert_eq!(cost(&steps, 0, &network).unwrap().seconds, 0.001 + 0.25);
/// ```
pub fn cost(steps: &[Step], rank: u64, network: &Network) -> Result<Cost, Error> {
    network.check()?;
    if rank >= network.size {
        return Err(Error::RankOutOfRange { rank, size: network.size });
    }
    let mut lines = Lines { network, up_free: 0.0, down_free: 0.0, local_free: 0.0, link_bytes: 0.0 };
    let mut left = vec![(0.0_f64, 0.0_f64); steps.len()]; // of sends: when the first and the last byte leave
    let mut done = vec![0.0_f64; steps.len()]; // of messages
    let (mut now, mut busy) = (0.0_f64, 0.0_f64);
    let mut last = 0.0_f64; // arrival of what was sent
    for (index, step) in steps.iter().enumerate() {
        let kind = *KINDS.get(step.kind as usize).ok_or(Error::StepKind { index, kind: step.kind })?;
        let is_message = matches!(kind, Kind::Send | Kind::Receive);
        let computed = step.busy_ns.max(0) as f64 * 1e-9 * network.slowdown;
        let spent = computed + if is_message { network.per_message } else { 0.0 };
        now += spent;
        busy += spent;
        if kind == Kind::Wait {
            let message = about(step, index)?.filter(|&message| message < index);
            now = now.max(done[message.ok_or(Error::StepAbout { index, about: step.about })?]);
        }
        if !is_message {
            continue;
        }
        let other = about(step, index)?;
        let partner = other.and_then(|other| steps.get(other)).map(|other| other.peer);
        let crossing =
            network.crossing(distance(step, index, rank, network.size)?, partner == Some(step.peer), rank);
        if kind == Kind::Send {
            left[index] = lines.send(now, crossing, step.bytes);
            done[index] = left[index].1;
            let latency = if crossing > 0.0 { network.latency } else { 0.0 };
            last = last.max(done[index] + latency);
        }
        // The second of a pair tells when the one that is received is there.
        let (send, receive) = match (kind, other) {
            (Kind::Receive, None) => (None, index),
            (_, None) => continue,
            (_, Some(other)) if other >= index => continue,
            (Kind::Receive, Some(other)) => (Some(other), index),
            (_, Some(other)) => (Some(index), other),
        };
        let bytes = steps[receive].bytes;
        let sent = send.map_or((now, now + crossing * bytes as f64 / network.up), |send| left[send]);
        done[receive] = lines.receive(sent, crossing, bytes);
    }
    Ok(Cost { seconds: now.max(last), busy, link_bytes: lines.link_bytes })
}

/// How far around the group the other rank of a message is.
fn distance(step: &Step, index: usize, rank: u64, size: u64) -> Result<u64, Error> {
    let peer = u64::try_from(step.peer).ok().filter(|&peer| peer < size && peer != rank);
    peer.map(|peer| (peer + size - rank) % size).ok_or(Error::StepPeer { index, peer: step.peer, size })
}

/// The index of the step that `step` is about, if there is one.
fn about(step: &Step, index: usize) -> Result<Option<usize>, Error> {
    match step.about {
        u64::MAX => Ok(None),
        about => usize::try_from(about).map(Some).map_err(|_| Error::StepAbout { index, about }),
    }
}

/// The link of the rank's host, and its memory.
struct Lines<'a> {
    network: &'a Network,
    up_free: f64,
    down_free: f64,
    local_free: f64,
    link_bytes: f64,
}

impl Lines<'_> {
    /// When the first and the last byte leave of what the host's ranks post `now`, of whose messages so
    /// many are for another host. If there are any, they are the slowest.
    fn send(&mut self, now: f64, crossing: f64, bytes: u64) -> (f64, f64) {
        let begin = now.max(self.up_free);
        let local_begin = now.max(self.local_free);
        let here = self.network.ranks_per_host as f64 - crossing;
        self.local_free = local_begin + here * bytes as f64 / self.network.local;
        if crossing == 0.0 {
            return (local_begin, self.local_free);
        }
        self.up_free = begin + crossing * bytes as f64 / self.network.up;
        self.link_bytes += crossing * bytes as f64;
        (begin, self.up_free)
    }

    /// When they are there.
    fn receive(&mut self, sent: (f64, f64), crossing: f64, bytes: u64) -> f64 {
        if crossing == 0.0 {
            return sent.1;
        }
        self.down_free = self.down_free.max(sent.0) + crossing * bytes as f64 / self.network.down;
        self.down_free.max(sent.1) + self.network.latency
    }
}
