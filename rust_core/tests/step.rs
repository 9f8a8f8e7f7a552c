//! The step against an oracle in plain loops, and its invariants on random layouts, random ready
//! events and random suspensions. On a failure the seed of the case is printed.
//!
//! The oracle's only state is the list of decisions, which it searches for each new one.

mod random;

use bagua_rust::error::Error;
use bagua_rust::planner::{plan, BucketPlan};
use bagua_rust::step::{Decision, Decision::*, Outcome, StepMachine, LAUNCHES_UNTIL_RESUME};
use random::{random_case, Case, SplitMix64};

const NUM_CASES: u64 = 1500;
const NUM_SLOW_CASES: u64 = 200; // cases that are compared with the oracle
const NUM_RANKS: usize = 4;

/// A random layout, with the number of suspensions of each bucket.
struct Layout {
    case: Case,
    bucket_of: Vec<u64>,
    num_buckets: usize,
    num_yields: Vec<usize>,
}

impl Layout {
    fn num_tensors(&self) -> usize {
        self.bucket_of.len()
    }

    fn machine(&self, finds_unused: bool) -> StepMachine {
        let mut step = StepMachine::new(self.num_tensors(), finds_unused);
        step.lay_out(&self.bucket_of, &self.case.order).unwrap();
        step
    }
}

fn entries(indices: &[usize]) -> Vec<u64> {
    indices.iter().map(|&index| index as u64).collect()
}

fn indices(entries: &[u64]) -> Vec<usize> {
    entries.iter().map(|&entry| entry as usize).collect()
}

fn sorted(tensors: &[u64]) -> Vec<usize> {
    let mut tensors = indices(tensors);
    tensors.sort_unstable();
    tensors
}

fn planned(case: &Case, order: &[u64], seed: u64) -> BucketPlan {
    plan(&case.tensors, order, case.options)
        .unwrap_or_else(|error| panic!("seed {seed}: {error} for {case:?}"))
}

fn for_each_layout(num_cases: u64, mut check: impl FnMut(&Layout, &mut SplitMix64, u64)) {
    for seed in 0..num_cases {
        let mut random = SplitMix64::new(seed);
        let case = random_case(&mut random);
        let planned = planned(&case, &case.order, seed);
        let num_buckets = planned.bucket_numels.len();
        let max_yields = 1 + random.below(5);
        let num_yields = (0..num_buckets).map(|_| random.below(max_yields) as usize).collect();
        let bucket_of = entries(&planned.bucket_of);
        check(&Layout { case, bucket_of, num_buckets, num_yields }, &mut random, seed);
    }
}

/// A decision, with the number of events before it; `finish` is an event.
type Decided = Vec<(usize, Decision)>;

/// Takes all decisions; a bucket is suspended after each of its first starts, as often as it yields.
fn take(step: &mut StepMachine, num_left: &mut [usize], moment: usize, decided: &mut Decided) {
    while let Some(decision) = step.next_decision() {
        decided.push((moment, decision));
        if let Launch(bucket) | Resume(bucket) = decision {
            if num_left[bucket] > 0 {
                num_left[bucket] -= 1;
                step.suspended(bucket as u64).unwrap();
            }
        }
    }
}

/// One backward with `events`, whose decisions are taken when the machine says that there are some.
fn play(step: &mut StepMachine, layout: &Layout, events: &[u64]) -> (Outcome, Decided) {
    let (mut num_left, mut decided) = (layout.num_yields.clone(), Vec::new());
    step.begin().unwrap();
    for (index, &tensor) in events.iter().enumerate() {
        let num_before = decided.len();
        let has_decision = step.ready(tensor).unwrap();
        take(step, &mut num_left, index + 1, &mut decided);
        assert_eq!(has_decision, decided.len() > num_before, "tensor {tensor} of {events:?}");
    }
    assert!(step.is_open());
    let outcome = step.finish().unwrap();
    assert!(!step.is_open());
    take(step, &mut num_left, events.len() + 1, &mut decided);
    (outcome, decided)
}

/// The decisions in a stage that exchanges gradients while no order is agreed on.
fn oracle(layout: &Layout, events: &[u64], finds_unused: bool) -> Decided {
    let mut decided: Decided = Vec::new();
    // The last start of the bucket, if it was suspended after it.
    let suspended_at = |decided: &Decided, bucket: usize| {
        let is_start =
            |(_, decision): &(usize, Decision)| [Launch(bucket), Resume(bucket)].contains(decision);
        let num_starts = decided.iter().filter(|&decision| is_start(decision)).count();
        let last = decided.iter().rposition(is_start);
        last.filter(|_| num_starts <= layout.num_yields[bucket])
    };
    let first_suspended = |decided: &Decided| {
        let all = (0..layout.num_buckets).filter_map(|bucket| Some((suspended_at(decided, bucket)?, bucket)));
        all.min()
    };
    let num_launches =
        |part: &[(usize, Decision)]| part.iter().filter(|decided| matches!(decided.1, Launch(_))).count();
    for moment in 1..=events.len() + 1 {
        loop {
            let bucket = num_launches(&decided);
            let is_finished = moment == events.len() + 1;
            let ready = &events[..moment.min(events.len())];
            let is_complete = (0..layout.num_tensors() as u64)
                .all(|tensor| layout.bucket_of[tensor as usize] != bucket as u64 || ready.contains(&tensor));
            let due = first_suspended(&decided).filter(|&(at, _)| num_launches(&decided[at + 1..]) >= 2);
            if let Some((_, suspended)) = due {
                decided.push((moment, Resume(suspended)));
            } else if bucket < layout.num_buckets && (is_complete || is_finished) {
                decided.push((moment, Launch(bucket)));
            } else {
                break;
            }
        }
    }
    let moment = events.len() + 1;
    decided.push((moment, SendBuffers));
    if finds_unused {
        decided.push((moment, AgreeOnUse));
    }
    while let Some((_, suspended)) = first_suspended(&decided) {
        decided.push((moment, Resume(suspended)));
    }
    decided.extend((0..layout.num_buckets).map(|bucket| (moment, Wait(bucket))));
    if finds_unused {
        decided.push((moment, FinalizeUse));
    }
    decided.push((moment, AgreeOnOrder));
    decided
}

fn without_moments(decided: &Decided) -> Vec<Decision> {
    decided.iter().map(|&(_, decision)| decision).collect()
}

/// Each decision is made at the event that first allows it, and all ranks decide the same sequence,
/// whatever their events.
#[test]
fn every_rank_decides_the_same_and_as_the_oracle() {
    for_each_layout(NUM_SLOW_CASES, |layout, random, seed| {
        let finds_unused = layout.num_tensors() == 0 || random.below(2) == 0;
        let mut step = layout.machine(finds_unused);
        let mut first_rank = None;
        for rank in 0..NUM_RANKS {
            let mut events = random.permutation(layout.num_tensors());
            if finds_unused {
                events.truncate(random.below(events.len() as u64 + 1) as usize);
                // the others stay unused
            }
            let (outcome, decided) = play(&mut step, layout, &events);
            assert_eq!(outcome, Outcome::Complete, "seed {seed} rank {rank}");
            assert_eq!(decided, oracle(layout, &events, finds_unused), "seed {seed} rank {rank} {events:?}");
            let sequence = without_moments(&decided);
            assert_eq!(&sequence, first_rank.get_or_insert(sequence.clone()), "seed {seed} rank {rank}");
            assert_eq!(step.num_launched(), layout.num_buckets, "seed {seed} rank {rank}");
        }
    });
}

/// The same sequence where decisions are taken late: not after each event but now and then.
#[test]
fn when_decisions_are_taken_does_not_matter() {
    for_each_layout(NUM_CASES, |layout, random, seed| {
        let mut step = layout.machine(true);
        let (_, expected) = play(&mut step, layout, &random.permutation(layout.num_tensors()));
        let (mut num_left, mut decided) = (layout.num_yields.clone(), Vec::new());
        step.begin().unwrap();
        for &tensor in &random.permutation(layout.num_tensors()) {
            step.ready(tensor).unwrap();
            if random.below(3) == 0 {
                take(&mut step, &mut num_left, 0, &mut decided);
            }
        }
        step.finish().unwrap();
        take(&mut step, &mut num_left, 0, &mut decided);
        assert_eq!(without_moments(&decided), without_moments(&expected), "seed {seed}");
    });
}

/// Every bucket is launched once and waited for once, in the order of the numbers, after it was
/// resumed as often as it was suspended; none is resumed before two more were launched, but at the
/// end of backward.
#[test]
fn what_is_launched_is_resumed_and_waited_for() {
    assert_eq!(LAUNCHES_UNTIL_RESUME, 2);
    for_each_layout(NUM_CASES, |layout, random, seed| {
        let mut step = layout.machine(true);
        let (_, decided) = play(&mut step, layout, &random.permutation(layout.num_tensors()));
        let sequence = without_moments(&decided);
        let position_of =
            |sought: Decision| sequence.iter().position(|&decision| decision == sought).unwrap();
        let all = |of: fn(usize) -> Decision| (0..layout.num_buckets).map(of).collect::<Vec<_>>();
        let only = |of: fn(&Decision) -> bool| sequence.iter().copied().filter(of).collect::<Vec<_>>();
        assert_eq!(only(|decision| matches!(decision, Launch(_))), all(Launch), "seed {seed}");
        assert_eq!(only(|decision| matches!(decision, Wait(_))), all(Wait), "seed {seed}");
        for bucket in 0..layout.num_buckets {
            let mut last_start = position_of(Launch(bucket));
            let mut num_resumes = 0;
            for (index, _) in sequence.iter().enumerate().filter(|&(_, &other)| other == Resume(bucket)) {
                let between = &sequence[last_start + 1..index];
                let num_launches = between.iter().filter(|other| matches!(other, Launch(_))).count();
                let is_at_end = index > position_of(SendBuffers);
                assert!(is_at_end || num_launches == 2, "seed {seed} bucket {bucket}: {sequence:?}");
                last_start = index;
                num_resumes += 1;
            }
            assert_eq!(num_resumes, layout.num_yields[bucket], "seed {seed} bucket {bucket}");
            assert!(last_start < position_of(Wait(0)), "seed {seed} bucket {bucket}");
        }
    });
}

#[test]
fn ready_and_missing_partition_the_tensors_and_all_are_in_the_observed_order() {
    for_each_layout(NUM_CASES, |layout, random, seed| {
        let events = random.permutation(layout.num_tensors());
        let (ready, unready) = events.split_at(random.below(events.len() as u64 + 1) as usize);
        let mut step = layout.machine(true);
        assert_eq!(step.missing().collect::<Vec<_>>(), sorted(&events), "seed {seed}: all, before the first");
        assert_eq!(step.observed_order(), indices(&layout.case.order), "seed {seed}");
        step.begin().unwrap();
        ready.iter().for_each(|&tensor| drop(step.ready(tensor)));
        assert_eq!(step.missing().collect::<Vec<_>>(), sorted(unready), "seed {seed}");
        step.finish().unwrap();
        assert_eq!(step.missing().collect::<Vec<_>>(), sorted(unready), "seed {seed}");
        let never_ready = layout.case.order.iter().filter(|tensor| unready.contains(tensor));
        let expected: Vec<u64> = ready.iter().chain(never_ready).copied().collect();
        assert_eq!(step.observed_order(), indices(&expected), "seed {seed}");
    });
}

/// A layout made from the observed order is the same on every rank that makes it, and when the
/// events repeat, each bucket leaves at the very moment its last tensor is ready.
#[test]
fn replanning_from_the_observed_order_removes_all_waiting() {
    for_each_layout(NUM_CASES, |layout, random, seed| {
        let events = random.permutation(layout.num_tensors());
        let mut step = layout.machine(false);
        play(&mut step, layout, &events);
        let observed = entries(step.observed_order());
        let replanned = planned(&layout.case, &observed, seed);
        assert_eq!(planned(&layout.case, &events, seed), replanned, "seed {seed}");

        let reversed: Vec<u64> = observed.iter().rev().copied().collect();
        step.lay_out(&layout.bucket_of, &reversed).unwrap();
        assert_eq!(
            entries(step.observed_order()),
            reversed,
            "seed {seed}: a new layout's, before a step in it"
        );
        step.lay_out(&entries(&replanned.bucket_of), &observed).unwrap();
        step.begin().unwrap();
        for (index, &tensor) in events.iter().enumerate() {
            let bucket = replanned.bucket_of[tensor as usize];
            let is_last =
                events[index + 1..].iter().all(|&later| replanned.bucket_of[later as usize] != bucket);
            let expected = is_last.then_some(Launch(bucket));
            assert_eq!(step.ready(tensor), Ok(is_last), "seed {seed} tensor {tensor}");
            assert_eq!(step.next_decision(), expected, "seed {seed} tensor {tensor}");
            assert_eq!(step.next_decision(), None, "seed {seed} tensor {tensor}");
        }
    });
}

/// A dropped step has no effect on the next one, whatever dropped it and at whatever moment.
#[test]
fn dropped_steps_leave_no_trace() {
    for_each_layout(NUM_CASES, |layout, random, seed| {
        let finds_unused = random.below(2) == 0;
        let (mut disturbed, mut undisturbed) = (layout.machine(finds_unused), layout.machine(finds_unused));
        for end in 0..5 {
            let mut events = random.permutation(layout.num_tensors());
            let num_ready = random.below(events.len() as u64 + 1) as usize;
            let (mut num_left, mut decided) = (layout.num_yields.clone(), Vec::new());
            let observed = disturbed.observed_order().to_vec();
            disturbed.begin().unwrap();
            for &tensor in &events[..num_ready] {
                disturbed.ready(tensor).unwrap();
                if random.below(3) > 0 {
                    take(&mut disturbed, &mut num_left, 0, &mut decided);
                }
            }
            match end {
                0 => disturbed.abort(),
                1 => (), // the next one begins
                2 if !finds_unused && num_ready < events.len() => {
                    let outcome = if num_ready == 0 { Outcome::Untouched } else { Outcome::Incomplete };
                    assert_eq!(disturbed.finish(), Ok(outcome), "seed {seed}");
                    assert_eq!(disturbed.next_decision(), None, "seed {seed}");
                    assert_eq!(disturbed.missing().collect::<Vec<_>>(), sorted(&events[num_ready..]));
                }
                3 if finds_unused => {
                    assert_eq!(disturbed.finish(), Ok(Outcome::Complete), "seed {seed}");
                    for _ in 0..random.below(10) {
                        disturbed.next_decision();
                    }
                    disturbed.abort(); // a communication failed
                }
                _ => disturbed.lay_out(&layout.bucket_of, &layout.case.order).unwrap_or_else(|error| {
                    assert_eq!(error, Error::StepOpen { operation: "lay_out" }, "seed {seed}");
                }),
            }
            if end != 3 {
                assert_eq!(disturbed.observed_order(), observed, "seed {seed}: not a complete step");
            }
            events.reverse();
            let expected = play(&mut undisturbed, layout, &events);
            assert_eq!(play(&mut disturbed, layout, &events), expected, "seed {seed} end {end}");
            assert_eq!(disturbed.observed_order(), undisturbed.observed_order(), "seed {seed} end {end}");
        }
    });
}

/// A refused call changes nothing, at any moment.
#[test]
fn refused_events_leave_no_trace() {
    for_each_layout(NUM_SLOW_CASES, |layout, random, seed| {
        let num_tensors = layout.num_tensors();
        let (bucket_of, order) = (&layout.bucket_of, &layout.case.order);
        let mut step = layout.machine(random.below(2) == 0);
        let too_many = vec![0; num_tensors + 1];
        let beyond = num_tensors as u64 + random.below(u64::MAX - num_tensors as u64);
        for _ in 0..3 * num_tensors + 6 {
            let before = format!("{step:?}");
            let mut refused: Vec<(Result<(), Error>, Error)> = vec![
                (step.lay_out(&too_many, order), Error::BucketsLength { len: num_tensors + 1, num_tensors }),
                (
                    step.lay_out(bucket_of, &too_many),
                    Error::OrderLength { order_len: num_tensors + 1, num_tensors },
                ),
                (step.agree(&too_many), Error::OrderLength { order_len: num_tensors + 1, num_tensors }),
                (step.ready(beyond).map(drop), Error::TensorOutOfRange { tensor: beyond, num_tensors }),
            ];
            if step.is_open() {
                refused[0].1 = Error::StepOpen { operation: "lay_out" };
                refused[1].1 = Error::StepOpen { operation: "lay_out" };
                refused.push((step.set_stage(9, true).map(drop), Error::StepOpen { operation: "set_stage" }));
                let is_missing = |tensor: &usize| step.missing().any(|other| other == *tensor);
                if let Some(tensor) = (0..num_tensors).find(|tensor| !is_missing(tensor)) {
                    refused.push((step.ready(tensor as u64).map(drop), Error::AlreadyReady { tensor }));
                }
            } else {
                refused[3].1 = Error::StepNotStarted { operation: "ready" };
                refused.push((step.finish().map(drop), Error::StepNotStarted { operation: "finish" }));
            }
            for (outcome, expected) in refused {
                assert_eq!(outcome, Err(expected), "seed {seed}");
            }
            let not_started = step.suspended(beyond);
            assert!(matches!(not_started, Err(Error::NotStartedLast { .. })), "seed {seed}");
            assert_eq!(format!("{step:?}"), before, "seed {seed}");
            match random.below(8) {
                0 => step.begin().unwrap(),
                1 if step.is_open() => drop(step.finish()),
                2 => drop(step.next_decision().map(|decision| match decision {
                    Launch(bucket) | Resume(bucket) => step.suspended(bucket as u64),
                    _ => Ok(()),
                })),
                _ => {
                    let next = step.missing().next().filter(|_| step.is_open());
                    next.map(|tensor| step.ready(tensor as u64));
                }
            }
        }
    });
}

/// Only the bucket that the last decision launched or resumed can be suspended, and only once.
#[test]
fn a_bucket_is_suspended_right_after_its_start() {
    let mut step = StepMachine::new(3, false);
    step.lay_out(&[0, 1, 2], &[0, 1, 2]).unwrap();
    let refused = |bucket, last| Err(Error::NotStartedLast { bucket, last });
    step.begin().unwrap();
    assert_eq!(step.suspended(0), refused(0, None));
    (0..3).for_each(|tensor| assert_eq!(step.ready(tensor), Ok(true)));
    assert_eq!(step.next_decision(), Some(Launch(0)));
    assert_eq!(step.suspended(1), refused(1, Some(0)));
    assert_eq!((step.suspended(0), step.suspended(0)), (Ok(()), refused(0, None)));
    assert_eq!((step.next_decision(), step.next_decision()), (Some(Launch(1)), Some(Launch(2))));
    assert_eq!(step.suspended(1), refused(1, Some(2)));
    assert_eq!(step.next_decision(), Some(Resume(0)));
    assert_eq!((step.suspended(2), step.suspended(0)), (refused(2, Some(0)), Ok(())));
    assert_eq!(step.finish(), Ok(Outcome::Complete));
    assert_eq!(step.next_decision(), Some(SendBuffers));
    assert_eq!((step.next_decision(), step.next_decision()), (Some(Resume(0)), Some(Wait(0))));
    assert_eq!(step.suspended(0), refused(0, None));
    step.abort();
    step.begin().unwrap();
    step.ready(0).unwrap();
    assert_eq!(step.next_decision(), Some(Launch(0)));
    step.abort();
    assert_eq!(step.suspended(0), refused(0, None));
}

/// A pending resumption is a decision even if no bucket can be launched.
#[test]
fn decisions_that_were_not_taken_are_told_of_again() {
    let mut step = StepMachine::new(5, false);
    step.lay_out(&[0, 1, 2, 3, 3], &[0, 1, 2, 3, 4]).unwrap();
    step.begin().unwrap();
    (0..3).for_each(|tensor| assert_eq!(step.ready(tensor), Ok(true)));
    assert_eq!((step.next_decision(), step.suspended(0)), (Some(Launch(0)), Ok(())));
    assert_eq!((step.next_decision(), step.next_decision()), (Some(Launch(1)), Some(Launch(2))));
    assert_eq!(step.ready(3), Ok(true));
    assert_eq!((step.next_decision(), step.next_decision()), (Some(Resume(0)), None));
}

/// Only a new stage, or a stage that launches or does not as before, is a reason to lay out; what is
/// decided follows the stage.
#[test]
fn stages_say_what_is_exchanged() {
    for_each_layout(NUM_SLOW_CASES, |layout, random, seed| {
        let mut step = layout.machine(true);
        let mut previous = None;
        for _ in 0..5 {
            let (stage, launches) = (random.below(2) as i64, random.below(2) == 0);
            let is_new = previous != Some((stage, launches));
            assert_eq!(step.set_stage(stage, launches), Ok(is_new), "seed {seed}");
            assert_eq!(step.set_stage(stage, launches), Ok(false), "seed {seed}");
            previous = Some((stage, launches));

            let events = random.permutation(layout.num_tensors());
            let (outcome, decided) = play(&mut step, layout, &events);
            let expected =
                if launches { oracle(layout, &events, true) } else { vec![(events.len() + 1, SendBuffers)] };
            assert_eq!((outcome, decided), (Outcome::Complete, expected), "seed {seed}");
            assert_eq!(step.num_launched(), if launches { layout.num_buckets } else { 0 }, "seed {seed}");
            assert_eq!(step.observed_order(), indices(&events), "seed {seed}: also of such a step");
        }
    });
}

/// A stage does not change in the middle of a step.
#[test]
fn a_stage_stays_until_the_step_ends() {
    let mut step = StepMachine::new(1, false);
    step.lay_out(&[0], &[0]).unwrap();
    assert_eq!(step.set_stage(4, false), Ok(true));
    step.begin().unwrap();
    assert_eq!((step.ready(0), step.next_decision()), (Ok(false), None));
    assert_eq!(step.set_stage(4, false), Ok(false));
    assert_eq!(step.set_stage(4, true), Err(Error::StepOpen { operation: "set_stage" }));
    assert_eq!(step.set_stage(5, false), Err(Error::StepOpen { operation: "set_stage" }));
    assert_eq!(step.finish(), Ok(Outcome::Complete));
    assert_eq!((step.next_decision(), step.next_decision()), (Some(SendBuffers), None));
}

/// Orders that are agreed on, and layouts, in any sequence: a layout is due while the last of either
/// differ, an order is agreed on in each step until one is, and neither is forgotten.
#[test]
fn a_layout_is_due_until_it_is_made() {
    for_each_layout(NUM_CASES, |layout, random, seed| {
        let mut step = StepMachine::new(layout.num_tensors(), true);
        let (mut agreed, mut laid_out): (Option<Vec<u64>>, Option<Vec<u64>>) = (None, None);
        let orders = [random.permutation(layout.num_tensors()), random.permutation(layout.num_tensors())];
        for _ in 0..12 {
            let order = &orders[random.below(2) as usize];
            match random.below(4) {
                0 => {
                    step.agree(order).unwrap();
                    agreed = Some(order.clone());
                }
                1 => {
                    step.lay_out(&layout.bucket_of, order).unwrap();
                    laid_out = Some(order.clone());
                }
                2 => step.abort(),
                _ if laid_out.is_none() => assert_eq!(step.begin(), Err(Error::NotLaidOut), "seed {seed}"),
                _ => {
                    let (_, decided) = play(&mut step, layout, &orders[0]);
                    let asks = decided.iter().filter(|&&(_, decision)| decision == AgreeOnOrder).count();
                    assert_eq!(asks, usize::from(agreed.is_none()), "seed {seed}");
                }
            }
            let expected = agreed.clone().filter(|_| agreed != laid_out);
            assert_eq!(step.agreed_order().map(entries), agreed, "seed {seed}");
            assert_eq!(step.layout_due().map(entries), expected, "seed {seed}");
        }
    });
}

#[test]
fn buckets_are_numbered_without_gaps() {
    let mut step = StepMachine::new(3, false);
    let order = [2, 0, 1];
    let gap = Error::EmptyBucket { bucket: 1, num_buckets: 3 };
    let beyond = |tensor, bucket| Error::BucketTooLarge { tensor, bucket, num_tensors: 3 };
    for (bucket_of, error) in [
        ([0, 2, 2], gap),
        ([1, 1, 1], Error::EmptyBucket { bucket: 0, num_buckets: 2 }),
        ([0, 3, 1], beyond(1, 3)),
        ([0, 1, u64::MAX], beyond(2, u64::MAX)),
    ] {
        assert_eq!(step.lay_out(&bucket_of, &order), Err(error));
        assert_eq!(step.begin(), Err(Error::NotLaidOut));
    }
    assert_eq!(step.lay_out(&[2, 1, 0], &order), Ok(()));
}

#[test]
fn a_model_without_tensors_has_steps_too() {
    for (finds_unused, outcome) in [(false, Outcome::Untouched), (true, Outcome::Complete)] {
        let mut step = StepMachine::new(0, finds_unused);
        assert_eq!(step.begin(), Err(Error::NotLaidOut));
        step.lay_out(&[], &[]).unwrap();
        step.begin().unwrap();
        assert_eq!(step.ready(0), Err(Error::TensorOutOfRange { tensor: 0, num_tensors: 0 }));
        assert_eq!(step.finish(), Ok(outcome));
        let decisions: Vec<Decision> = std::iter::from_fn(|| step.next_decision()).collect();
        let expected: &[Decision] =
            if finds_unused { &[SendBuffers, AgreeOnUse, FinalizeUse, AgreeOnOrder] } else { &[] };
        assert_eq!(decisions, expected);
        assert!(step.observed_order().is_empty());
    }
}
