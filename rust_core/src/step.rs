//! The step machine: events of a training step in, decisions out.
//!
//! Data path: gradient hook -> tensor index -> **step** -> launch, resume, wait, agree -> algorithm and engine.
//!
//! Invariants: the order of everything that ranks must do together depends on the layout, the stage
//! and the decisions at which buckets were suspended, never on the order of this rank's ready events
//! or on a time of completion. Buckets are launched strictly in the order of their numbers, each once
//! per step, and before `finish` only when all its tensors are ready. Every launched bucket is waited
//! for once, after its last resumption. `ready` and `next_decision` cost O(1) amortised over a step; a
//! step does not allocate. After an error the state is unchanged. Not thread-safe; the caller
//! serialises calls (in Python, the GIL does).

use std::collections::VecDeque;

use crate::error::Error;
use crate::planner::check_order;

/// The number of launches between a bucket's suspension and its resumption, unless backward ends.
pub const LAUNCHES_UNTIL_RESUME: usize = 2;

/// The next action for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Start this bucket's communication.
    Launch(usize),
    /// Continue the communication of this bucket, which was suspended.
    Resume(usize),
    /// Wait until this bucket's communication is complete.
    Wait(usize),
    /// Start the message by which ranks agree on the tensors that were used.
    AgreeOnUse,
    /// Apply the result of that message.
    FinalizeUse,
    /// Start the message with rank 0's buffers.
    SendBuffers,
    /// Agree with the other ranks on a ready order, and tell the machine by [`StepMachine::agree`].
    AgreeOnOrder,
}

/// The outcome of a backward's computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Outcome {
    /// No tensor became ready, so the backward was not of this model. The step is dropped.
    Untouched = 0,
    /// Some tensors did not become ready, though all must. The step is dropped.
    Incomplete = 1,
    /// Decisions remain, up to the end of the step.
    Complete = 2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    Backward,
    // After `finish`, in this order where gradients are exchanged; elsewhere `SendingBuffers` is the only one.
    Launching,
    SendingBuffers,
    AgreeingOnUse,
    Resuming,
    Waiting { next: usize },
    FinalizingUse,
    AgreeingOnOrder,
}

/// The steps of one wrapped model, one after the other.
///
/// # Example
/// ```
/// use bagua_rust::step::{Decision::*, Outcome, StepMachine};
/// let mut step = StepMachine::new(3, false);
/// step.lay_out(&[0, 1, 2], &[0, 1, 2]).unwrap(); // one tensor per bucket
/// step.begin().unwrap();
/// assert_eq!(step.ready(1), Ok(false)); // waits for bucket 0
/// assert_eq!(step.ready(0), Ok(true));
/// assert_eq!(step.next_decision(), Some(Launch(0)));
/// step.suspended(0).unwrap(); // continues after two more launches
/// assert_eq!((step.next_decision(), step.next_decision()), (Some(Launch(1)), None));
/// assert_eq!(step.ready(2), Ok(true));
/// assert_eq!(step.finish(), Ok(Outcome::Complete));
/// let decisions: Vec<_> = std::iter::from_fn(|| step.next_decision()).collect();
/// assert_eq!(decisions, [Launch(2), Resume(0), SendBuffers, Wait(0), Wait(1), Wait(2), AgreeOnOrder]);
/// assert_eq!(step.observed_order(), [1, 0, 2]);
/// ```
#[derive(Debug, Clone)]
pub struct StepMachine {
    finds_unused: bool,
    // The stage:
    stage: Option<i64>, // None before the first
    launches: bool,
    // The layout.
    is_laid_out: bool,
    layout_order: Vec<usize>, // the ready order for which it was made
    bucket_of: Vec<usize>,
    num_tensors_of: Vec<usize>, // by bucket
    // The step:
    phase: Phase,
    is_ready: Vec<bool>,
    arrivals: Vec<usize>,    // tensors in the order they became ready; capacity for all
    num_pending: Vec<usize>, // by bucket: tensors that are not ready
    num_launched: usize,     // buckets with lower numbers are launched
    suspended: VecDeque<(usize, usize)>, // bucket, num_launched at that time; in order; capacity for all
    last_started: Option<usize>, // the bucket that may be suspended
    // Fields that outlive a step:
    observed_order: Vec<usize>, // of the last complete step, or the layout's
    agreed_order: Option<Vec<usize>>,
}

impl StepMachine {
    /// A machine for `num_tensors` tensors, in a stage that exchanges gradients, without a layout.
    /// With `finds_unused`, a backward may leave tensors unused.
    pub fn new(num_tensors: usize, finds_unused: bool) -> Self {
        StepMachine {
            finds_unused,
            stage: None,
            launches: true,
            is_laid_out: false,
            layout_order: (0..num_tensors).collect(),
            bucket_of: vec![0; num_tensors],
            num_tensors_of: Vec::new(),
            phase: Phase::Idle,
            is_ready: vec![false; num_tensors],
            arrivals: Vec::with_capacity(num_tensors),
            num_pending: Vec::new(),
            num_launched: 0,
            suspended: VecDeque::new(),
            last_started: None,
            observed_order: (0..num_tensors).collect(),
            agreed_order: None,
        }
    }

    // --- layout and stage ----------------------------------------------------------------------

    /// Sets a new layout: the bucket of each tensor, where buckets are numbered in launch order, and the
    /// ready order for which it was made. The rest of a finished step is dropped.
    ///
    /// # Errors
    /// A step is open; there is not one bucket per tensor; a bucket below the highest has no tensor;
    /// `order` is no permutation.
    pub fn lay_out(&mut self, bucket_of: &[u64], order: &[u64]) -> Result<(), Error> {
        if self.is_open() {
            return Err(Error::StepOpen { operation: "lay_out" });
        }
        let (bucket_of, num_tensors_of) = check_buckets(bucket_of, self.is_ready.len())?;
        self.layout_order = check_order(order, self.is_ready.len())?;
        self.bucket_of = bucket_of;
        self.num_pending = num_tensors_of.clone();
        self.suspended = VecDeque::with_capacity(num_tensors_of.len());
        self.num_tensors_of = num_tensors_of;
        self.is_laid_out = true;
        self.observed_order.clone_from(&self.layout_order);
        self.drop_step();
        Ok(())
    }

    /// The algorithm is in `stage` now. `launches`: gradients are exchanged, in backward; otherwise
    /// nothing is launched. Returns whether `stage` or `launches` is new, so that the buckets are to be
    /// laid out anew.
    ///
    /// # Errors
    /// One of those two is new while a step is open.
    pub fn set_stage(&mut self, stage: i64, launches: bool) -> Result<bool, Error> {
        let is_new = (self.stage, self.launches) != (Some(stage), launches);
        if is_new && self.is_open() {
            return Err(Error::StepOpen { operation: "set_stage" });
        }
        self.stage = Some(stage);
        self.launches = launches;
        Ok(is_new)
    }

    // --- backward ------------------------------------------------------------------------------

    /// Opens a step with no tensor ready and no bucket launched; one that is open (its backward
    /// raised) or has decisions left is dropped.
    ///
    /// # Errors
    /// No buckets are laid out yet.
    pub fn begin(&mut self) -> Result<(), Error> {
        if !self.is_laid_out {
            return Err(Error::NotLaidOut);
        }
        self.drop_step();
        self.is_ready.fill(false);
        self.arrivals.clear();
        self.num_pending.copy_from_slice(&self.num_tensors_of);
        self.num_launched = 0;
        self.phase = Phase::Backward;
        Ok(())
    }

    /// Returns true if a step is open: from `begin` to `finish` or `abort`.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Backward
    }

    /// Marks the gradient of `tensor` as ready. Returns true if there are decisions to take.
    ///
    /// # Errors
    /// No step is open; no such tensor; the tensor is already ready in this step.
    pub fn ready(&mut self, tensor: u64) -> Result<bool, Error> {
        if !self.is_open() {
            return Err(Error::StepNotStarted { operation: "ready" });
        }
        let num_tensors = self.is_ready.len();
        let index = usize::try_from(tensor)
            .ok()
            .filter(|&index| index < num_tensors)
            .ok_or(Error::TensorOutOfRange { tensor, num_tensors })?;
        if self.is_ready[index] {
            return Err(Error::AlreadyReady { tensor: index });
        }
        self.is_ready[index] = true;
        self.arrivals.push(index); // at most num_tensors per step: never grows
        self.num_pending[self.bucket_of[index]] -= 1; // counted once per ready tensor
        Ok(self.launches && (self.is_resume_due() || self.is_launch_due()))
    }

    /// Suspends the communication of `bucket`. [`Decision::Resume`] continues it after
    /// [`LAUNCHES_UNTIL_RESUME`] more buckets are launched, or at the end of backward.
    ///
    /// # Errors
    /// `bucket` was not launched or resumed last, or is suspended already.
    pub fn suspended(&mut self, bucket: u64) -> Result<(), Error> {
        match self.last_started {
            Some(last) if last as u64 == bucket => {
                self.suspended.push_back((last, self.num_launched)); // each bucket once: never grows
                self.last_started = None;
                Ok(())
            }
            last => Err(Error::NotStartedLast { bucket, last }),
        }
    }

    /// Ends backward's computation and returns its outcome; after [`Outcome::Complete`] decisions remain.
    ///
    /// # Errors
    /// No step is open.
    pub fn finish(&mut self) -> Result<Outcome, Error> {
        if !self.is_open() {
            return Err(Error::StepNotStarted { operation: "finish" });
        }
        if !self.finds_unused && self.arrivals.is_empty() {
            self.drop_step();
            return Ok(Outcome::Untouched);
        }
        if !self.finds_unused && self.arrivals.len() < self.is_ready.len() {
            self.drop_step();
            return Ok(Outcome::Incomplete);
        }
        let (ready, unready) = self.observed_order.split_at_mut(self.arrivals.len());
        ready.copy_from_slice(&self.arrivals);
        let never_ready = self.layout_order.iter().filter(|&&tensor| !self.is_ready[tensor]);
        unready.iter_mut().zip(never_ready).for_each(|(slot, &tensor)| *slot = tensor);
        self.phase = if self.launches { Phase::Launching } else { Phase::SendingBuffers };
        Ok(Outcome::Complete)
    }

    /// Drops the step, if there is one, because backward raised.
    pub fn abort(&mut self) {
        self.drop_step();
    }

    // --- decisions -----------------------------------------------------------------------------

    /// Takes the next decision; None if there is nothing to do now.
    pub fn next_decision(&mut self) -> Option<Decision> {
        loop {
            match self.phase {
                Phase::Idle => return None,
                Phase::Backward if !self.launches => return None,
                Phase::Backward | Phase::Launching if self.is_resume_due() => return self.resume(),
                Phase::Backward | Phase::Launching if self.is_launch_due() => {
                    self.last_started = Some(self.num_launched);
                    self.num_launched += 1;
                    return self.last_started.map(Decision::Launch);
                }
                Phase::Backward => return None,
                Phase::Launching => self.phase = Phase::SendingBuffers,
                Phase::SendingBuffers => {
                    self.phase = if self.launches { Phase::AgreeingOnUse } else { Phase::Idle };
                    return Some(Decision::SendBuffers);
                }
                Phase::AgreeingOnUse => {
                    self.phase = Phase::Resuming;
                    if self.finds_unused {
                        return Some(Decision::AgreeOnUse);
                    }
                }
                Phase::Resuming if !self.suspended.is_empty() => return self.resume(),
                Phase::Resuming => {
                    self.last_started = None;
                    self.phase = Phase::Waiting { next: 0 };
                }
                Phase::Waiting { next } if next < self.num_launched => {
                    self.phase = Phase::Waiting { next: next + 1 };
                    return Some(Decision::Wait(next));
                }
                Phase::Waiting { .. } => self.phase = Phase::FinalizingUse,
                Phase::FinalizingUse => {
                    self.phase = Phase::AgreeingOnOrder;
                    if self.finds_unused {
                        return Some(Decision::FinalizeUse);
                    }
                }
                Phase::AgreeingOnOrder => {
                    self.phase = Phase::Idle;
                    return self.agreed_order.is_none().then_some(Decision::AgreeOnOrder);
                }
            }
        }
    }

    fn is_launch_due(&self) -> bool {
        let num_pending = self.num_pending.get(self.num_launched);
        num_pending.map_or(false, |&num_pending| num_pending == 0 || self.phase == Phase::Launching)
    }

    fn is_resume_due(&self) -> bool {
        let first = self.suspended.front();
        first.map_or(false, |&(_, num_launched)| self.num_launched - num_launched >= LAUNCHES_UNTIL_RESUME)
    }

    fn resume(&mut self) -> Option<Decision> {
        self.last_started = self.suspended.pop_front().map(|(bucket, _)| bucket);
        self.last_started.map(Decision::Resume)
    }

    fn drop_step(&mut self) {
        self.phase = Phase::Idle;
        self.suspended.clear();
        self.last_started = None;
    }

    // --- state ---------------------------------------------------------------------------------

    /// Returns the tensors that are not ready, ascending; after the end of the step those that did not
    /// become ready; before the first step, all.
    pub fn missing(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.is_ready.iter().enumerate().filter(|(_, &is_ready)| !is_ready).map(|(tensor, _)| tensor)
    }

    /// Returns the number of buckets launched in this step, or in the last one.
    pub fn num_launched(&self) -> usize {
        self.num_launched
    }

    /// Returns the tensors in the order in which they became ready in the last complete step, followed
    /// by the others in the layout's order; in a new layout, its order.
    pub fn observed_order(&self) -> &[usize] {
        &self.observed_order
    }

    /// Sets the ready order on which the ranks have agreed.
    ///
    /// # Errors
    /// `order` is no permutation.
    pub fn agree(&mut self, order: &[u64]) -> Result<(), Error> {
        self.agreed_order = Some(check_order(order, self.is_ready.len())?);
        Ok(())
    }

    /// Returns the agreed ready order; None while there is none.
    pub fn agreed_order(&self) -> Option<&[usize]> {
        self.agreed_order.as_deref()
    }

    /// Returns the agreed ready order if the buckets are laid out for another one, or not at all.
    pub fn layout_due(&self) -> Option<&[usize]> {
        self.agreed_order().filter(|&order| !self.is_laid_out || order != self.layout_order)
    }
}

/// Returns `bucket_of` as indices, and the number of tensors of each bucket.
fn check_buckets(bucket_of: &[u64], num_tensors: usize) -> Result<(Vec<usize>, Vec<usize>), Error> {
    if bucket_of.len() != num_tensors {
        return Err(Error::BucketsLength { len: bucket_of.len(), num_tensors });
    }
    let mut num_tensors_of = Vec::new();
    let mut indices = Vec::with_capacity(num_tensors);
    for (tensor, &entry) in bucket_of.iter().enumerate() {
        let bucket = usize::try_from(entry)
            .ok()
            .filter(|&bucket| bucket < num_tensors)
            .ok_or(Error::BucketTooLarge { tensor, bucket: entry, num_tensors })?;
        if num_tensors_of.len() <= bucket {
            num_tensors_of.resize(bucket + 1, 0);
        }
        num_tensors_of[bucket] += 1;
        indices.push(bucket);
    }
    match num_tensors_of.iter().position(|&num| num == 0) {
        Some(bucket) => Err(Error::EmptyBucket { bucket, num_buckets: num_tensors_of.len() }),
        None => Ok((indices, num_tensors_of)),
    }
}
