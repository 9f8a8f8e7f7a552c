//! The ready-order scheduler: tensor-ready events in, launchable buckets out.
//!
//! Data path: gradient hook -> tensor index -> **schedule** -> bucket range -> algorithm and engine.
//!
//! Invariants: buckets are launched strictly in plan order, so every rank launches the same
//! sequence whatever the order of its ready events; a bucket is launched once per step, and by
//! `mark_ready` only when all its members are ready. `mark_ready` costs O(1) amortised over a step
//! and allocates nothing. Not thread-safe; the caller serialises (in Python, the GIL does).

use std::ops::Range;

use crate::error::Error;
use crate::planner::BucketPlan;

/// Launches the buckets of one wrapped model, step after step.
///
/// # Example
/// ```
/// use bagua_rust::planner::{plan, PlanOptions, TensorSpec};
/// use bagua_rust::scheduler::ReadyOrderScheduler;
/// let options = PlanOptions { small_bucket_bytes: 64, bucket_bytes: 64, align_bytes: 64 };
/// let tensors = [TensorSpec { numel: 16, item_bytes: 4, key: 0 }; 3];
/// let plan = plan(&tensors, &[0, 1, 2], options).unwrap(); // one tensor per bucket
///
/// let mut scheduler = ReadyOrderScheduler::new(&plan);
/// scheduler.begin_step();
/// assert_eq!(scheduler.mark_ready(1), Ok(0..0)); // waits for bucket 0
/// assert_eq!(scheduler.mark_ready(0), Ok(0..2));
/// assert_eq!(scheduler.missing().collect::<Vec<_>>(), [2]);
/// assert_eq!(scheduler.finish(), Ok(2..3));
/// assert_eq!(scheduler.observed_order(), [1, 0, 2]);
/// ```
#[derive(Debug, Clone)]
pub struct ReadyOrderScheduler {
    // From the plan, constant.
    plan_order: Vec<usize>,
    bucket_of_tensor: Vec<usize>,
    num_members: Vec<usize>,
    // Of the step under way.
    is_in_step: bool,
    is_ready: Vec<bool>,
    num_pending: Vec<usize>, // per bucket: members not ready
    next_launch: usize,      // every bucket below it has been launched
    arrivals: Vec<usize>,    // tensors in the order they became ready; capacity for all of them
    // Of the last complete step.
    observed_order: Vec<usize>,
}

impl ReadyOrderScheduler {
    /// A scheduler for `plan`, outside a step; it keeps what it needs of the plan.
    pub fn new(plan: &BucketPlan) -> Self {
        let num_tensors = plan.order.len();
        let mut bucket_of_tensor = vec![0; num_tensors];
        for (index, bucket) in plan.buckets.iter().enumerate() {
            for member in &bucket.members {
                bucket_of_tensor[member.tensor] = index;
            }
        }
        let num_members: Vec<usize> = plan.buckets.iter().map(|bucket| bucket.members.len()).collect();
        ReadyOrderScheduler {
            plan_order: plan.order.clone(),
            bucket_of_tensor,
            is_in_step: false,
            is_ready: vec![false; num_tensors],
            num_pending: num_members.clone(),
            num_members,
            next_launch: 0,
            arrivals: Vec::with_capacity(num_tensors),
            observed_order: plan.order.clone(),
        }
    }

    /// Starts a step with no tensor ready and no bucket launched. A step that is under way (its
    /// backward raised) is dropped; the observed order stays that of the last complete step.
    pub fn begin_step(&mut self) {
        self.is_in_step = true;
        self.is_ready.fill(false);
        self.num_pending.copy_from_slice(&self.num_members);
        self.next_launch = 0;
        self.arrivals.clear();
    }

    /// Marks `tensor` ready; returns the buckets to launch now, in this order (often none).
    ///
    /// # Errors
    /// No step is under way; no such tensor; the tensor is already ready in this step
    /// ([`Error::AlreadyReady`]). After an error the step is as it was.
    pub fn mark_ready(&mut self, tensor: u64) -> Result<Range<usize>, Error> {
        if !self.is_in_step {
            return Err(Error::StepNotStarted { operation: "mark_ready" });
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
        self.num_pending[self.bucket_of_tensor[index]] -= 1; // counted once per ready member

        let first = self.next_launch;
        while self.num_pending.get(self.next_launch) == Some(&0) {
            self.next_launch += 1;
        }
        if self.arrivals.len() == num_tensors {
            self.observed_order.copy_from_slice(&self.arrivals);
        }
        Ok(first..self.next_launch)
    }

    /// The tensors not ready in the step under way, ascending; after `finish`, those that never
    /// became ready; before the first step, all.
    pub fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        self.is_ready.iter().enumerate().filter(|(_, &is_ready)| !is_ready).map(|(tensor, _)| tensor)
    }

    /// Ends the step: returns the buckets not launched yet and counts them as launched. For steps
    /// in which some tensors may stay unused; where none may, check [`missing`](Self::missing) first.
    ///
    /// # Errors
    /// No step is under way.
    pub fn finish(&mut self) -> Result<Range<usize>, Error> {
        if !self.is_in_step {
            return Err(Error::StepNotStarted { operation: "finish" });
        }
        self.is_in_step = false;
        let (ready, unready) = self.observed_order.split_at_mut(self.arrivals.len());
        ready.copy_from_slice(&self.arrivals);
        let never_ready = self.plan_order.iter().filter(|&&tensor| !self.is_ready[tensor]);
        unready.iter_mut().zip(never_ready).for_each(|(slot, &tensor)| *slot = tensor);
        let first = std::mem::replace(&mut self.next_launch, self.num_members.len());
        Ok(first..self.num_members.len())
    }

    /// The tensors in the order in which they became ready in the last complete step, those that
    /// did not in plan order behind them; before the first complete step, the plan's order. A step
    /// is complete when all tensors are ready or `finish` was called.
    pub fn observed_order(&self) -> &[usize] {
        &self.observed_order
    }
}
