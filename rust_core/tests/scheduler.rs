//! The scheduler against an oracle in plain loops, and its invariants on random plans and random
//! ready events. On a failure the seed of the case is printed.

mod random;

use bagua_rust::error::Error;
use bagua_rust::planner::{plan, BucketPlan, PlanOptions, TensorSpec};
use bagua_rust::scheduler::ReadyOrderScheduler;
use random::{random_case, Case, SplitMix64};

const NUM_CASES: u64 = 3000;
const NUM_RANKS: usize = 4;

fn for_each_plan(mut check: impl FnMut(&Case, &BucketPlan, &mut SplitMix64, u64)) {
    for seed in 0..NUM_CASES {
        let mut random = SplitMix64::new(seed);
        let case = random_case(&mut random);
        let planned = plan(&case.tensors, &case.order, case.options)
            .unwrap_or_else(|error| panic!("seed {seed}: {error} for {case:?}"));
        check(&case, &planned, &mut random, seed);
    }
}

fn indices(order: &[u64]) -> Vec<usize> {
    order.iter().map(|&entry| entry as usize).collect()
}

/// How many buckets may have been launched once `ready` are ready: looks at everything anew.
fn oracle_num_launched(planned: &BucketPlan, ready: &[u64]) -> usize {
    let mut num_launched = 0;
    for bucket in planned.buckets() {
        if bucket.members.iter().any(|member| !ready.contains(&(member.tensor as u64))) {
            break;
        }
        num_launched += 1;
    }
    num_launched
}

/// On every rank, whatever its ready events: the same sequence, the plan's; no bucket before its
/// members, none later than it may be; all of them once all tensors are ready.
#[test]
fn every_rank_launches_the_plan() {
    for_each_plan(|case, planned, random, seed| {
        let mut scheduler = ReadyOrderScheduler::new(planned);
        for rank in 0..NUM_RANKS {
            let events = random.permutation(case.tensors.len());
            let mut launched: Vec<usize> = Vec::new();
            scheduler.begin_step();
            for (index, &tensor) in events.iter().enumerate() {
                launched.extend(scheduler.mark_ready(tensor).unwrap());
                let expected: Vec<usize> = (0..oracle_num_launched(planned, &events[..=index])).collect();
                assert_eq!(launched, expected, "seed {seed} rank {rank} events {events:?}");
            }
            assert_eq!(launched.len(), planned.buckets().len(), "seed {seed} rank {rank}");
            assert_eq!(scheduler.missing().count(), 0, "seed {seed} rank {rank}");
            assert_eq!(scheduler.observed_order(), indices(&events), "seed {seed} rank {rank}");
            let num_buckets = planned.buckets().len();
            assert_eq!(scheduler.finish(), Ok(num_buckets..num_buckets), "seed {seed} rank {rank}");
            assert_eq!(scheduler.observed_order(), indices(&events), "seed {seed} rank {rank}");
        }
    });
}

/// Ready and missing partition the tensors; launched and finished partition the buckets.
#[test]
fn finish_and_missing_partition_an_incomplete_step() {
    for_each_plan(|case, planned, random, seed| {
        let events = random.permutation(case.tensors.len());
        let (ready, unready) = events.split_at(random.below(events.len() as u64 + 1) as usize);
        let mut scheduler = ReadyOrderScheduler::new(planned);
        scheduler.begin_step();
        let mut launched: Vec<usize> = Vec::new();
        for &tensor in ready {
            launched.extend(scheduler.mark_ready(tensor).unwrap());
        }

        let mut expected_missing = indices(unready);
        expected_missing.sort_unstable();
        assert_eq!(scheduler.missing().collect::<Vec<_>>(), expected_missing, "seed {seed}");
        launched.extend(scheduler.finish().unwrap());
        assert_eq!(launched, (0..planned.buckets().len()).collect::<Vec<_>>(), "seed {seed}");
        assert_eq!(scheduler.missing().collect::<Vec<_>>(), expected_missing, "seed {seed}");

        let mut expected_order = indices(ready);
        expected_order.extend(indices(&case.order).iter().filter(|tensor| expected_missing.contains(tensor)));
        assert_eq!(scheduler.observed_order(), expected_order, "seed {seed}");
    });
}

/// A plan made from the observed order is the same on every rank that makes it, and when the events
/// repeat, each bucket leaves at the very moment its last member is ready.
#[test]
fn replanning_from_the_observed_order_removes_all_waiting() {
    for_each_plan(|case, planned, random, seed| {
        let events = random.permutation(case.tensors.len());
        let mut scheduler = ReadyOrderScheduler::new(planned);
        scheduler.begin_step();
        for &tensor in &events {
            scheduler.mark_ready(tensor).unwrap();
        }
        let observed: Vec<u64> = scheduler.observed_order().iter().map(|&tensor| tensor as u64).collect();
        let replanned = plan(&case.tensors, &observed, case.options).unwrap();
        assert_eq!(plan(&case.tensors, &events, case.options).as_ref(), Ok(&replanned), "seed {seed}");

        let mut scheduler = ReadyOrderScheduler::new(&replanned);
        scheduler.begin_step();
        for &tensor in &events {
            let launched = scheduler.mark_ready(tensor).unwrap();
            let is_last = |members: &[bagua_rust::planner::Member]| {
                members.last().map(|member| member.tensor as u64) == Some(tensor)
            };
            let complete = replanned.buckets().iter().position(|bucket| is_last(&bucket.members));
            let expected = complete.map_or(launched.end..launched.end, |bucket| bucket..bucket + 1);
            assert_eq!(launched, expected, "seed {seed} tensor {tensor}");
        }
    });
}

/// A step that is dropped half-way leaves no trace, and neither does a refused event.
#[test]
fn dropped_steps_and_refused_events_leave_no_trace() {
    for_each_plan(|case, planned, random, seed| {
        let num_tensors = case.tensors.len();
        let mut disturbed = ReadyOrderScheduler::new(planned);
        let mut undisturbed = ReadyOrderScheduler::new(planned);
        disturbed.begin_step();
        for &tensor in random.permutation(num_tensors).iter().take(num_tensors.saturating_sub(1)) {
            disturbed.mark_ready(tensor).unwrap();
        }
        assert_eq!(disturbed.observed_order(), indices(&case.order), "seed {seed}: not a complete step");

        disturbed.begin_step();
        undisturbed.begin_step();
        for &tensor in &random.permutation(num_tensors) {
            let launched = undisturbed.mark_ready(tensor);
            assert_eq!(disturbed.mark_ready(tensor), launched, "seed {seed}");
            let repeated = Error::AlreadyReady { tensor: tensor as usize };
            assert_eq!(disturbed.mark_ready(tensor), Err(repeated), "seed {seed}");
            let unknown = num_tensors as u64 + random.below(u64::MAX - num_tensors as u64);
            let out_of_range = Error::TensorOutOfRange { tensor: unknown, num_tensors };
            assert_eq!(disturbed.mark_ready(unknown), Err(out_of_range), "seed {seed}");
        }
        assert_eq!(disturbed.observed_order(), undisturbed.observed_order(), "seed {seed}");
    });
}

#[test]
fn events_outside_a_step_are_refused() {
    let tensors = [TensorSpec { numel: 1, item_bytes: 4, key: 0 }; 2];
    let options = PlanOptions { small_bucket_bytes: 8, bucket_bytes: 8, align_bytes: 8 };
    let mut scheduler = ReadyOrderScheduler::new(&plan(&tensors, &[1, 0], options).unwrap());
    let mark_refused = Err(Error::StepNotStarted { operation: "mark_ready" });
    let finish_refused = Err(Error::StepNotStarted { operation: "finish" });

    assert_eq!(scheduler.mark_ready(0), mark_refused);
    assert_eq!(scheduler.finish(), finish_refused);
    assert_eq!(scheduler.missing().collect::<Vec<_>>(), [0, 1]);
    assert_eq!(scheduler.observed_order(), [1, 0]);

    scheduler.begin_step();
    assert_eq!(scheduler.mark_ready(0), Ok(0..0));
    assert_eq!(scheduler.finish(), Ok(0..2));
    assert_eq!(scheduler.mark_ready(1), mark_refused);
    assert_eq!(scheduler.finish(), finish_refused);
    assert_eq!(scheduler.observed_order(), [0, 1]);

    scheduler.begin_step();
    assert_eq!(scheduler.missing().collect::<Vec<_>>(), [0, 1]);
    assert_eq!(scheduler.observed_order(), [0, 1], "the last complete step's");
}

#[test]
fn a_model_without_tensors_has_steps_too() {
    let options = PlanOptions { small_bucket_bytes: 8, bucket_bytes: 8, align_bytes: 8 };
    let mut scheduler = ReadyOrderScheduler::new(&plan(&[], &[], options).unwrap());
    scheduler.begin_step();
    assert_eq!(scheduler.mark_ready(0), Err(Error::TensorOutOfRange { tensor: 0, num_tensors: 0 }));
    assert_eq!(scheduler.finish(), Ok(0..0));
    assert!(scheduler.observed_order().is_empty());
}
