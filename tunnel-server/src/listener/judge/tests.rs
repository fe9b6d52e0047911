use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tunnel_link::outcome::{Hop, Outcome};

use super::*;
use crate::listener::context::Reached;
use crate::listener::{AccessLogGuard, ListenerContext};
use crate::metrics::{Permit, UNANSWERED};

const PATIENCE: Duration = Duration::from_secs(10);

/// Answers what it is told, or never.
struct Fake {
    asker: Option<[u8; 32]>,
    answer: Mutex<Option<Judgement>>,
    asked: AtomicUsize,
}

impl Fake {
    fn new(asker: Option<u8>, answer: Option<Judgement>) -> Arc<Self> {
        let asker = asker.map(|asker| [asker; 32]);
        Arc::new(Self { asker, answer: Mutex::new(answer), asked: AtomicUsize::new(0) })
    }

    fn says(&self, answer: Judgement) {
        *self.answer.lock() = Some(answer);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

#[tonic::async_trait]
impl Permit for Fake {
    fn asker(&self) -> Option<[u8; 32]> {
        self.asker
    }

    async fn judge(&self) -> Judgement {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let answer = self.answer.lock().clone();
        match answer {
            Some(answer) => answer,
            None => std::future::pending().await,
        }
    }
}

fn open(context: &ListenerContext, permit: Option<&Arc<Fake>>) -> AccessLogGuard {
    let (client, target) = ("10.70.0.9:40000".parse().unwrap(), "10.70.0.1:22".parse().unwrap());
    let record = AccessLogGuard::reaching("connect", client, &Reached::Cloud(target), context);
    if let Some(permit) = permit {
        record.admitted_by(permit.clone());
    }
    record
}

fn is_ended(record: &AccessLogGuard) -> bool {
    record.aborted().now_or_never().is_some()
}

fn gone() -> Judgement {
    Judgement::Withdrawn("the token is gone".to_owned())
}

fn refused() -> Judgement {
    Judgement::Refused("the token is gone".to_owned())
}

fn unanswered() -> Judgement {
    Judgement::Unanswered("no answer".to_owned())
}

#[tokio::test]
async fn a_connection_ends_with_its_right_and_the_log_says_why() {
    let context = ListenerContext::without_nodes();
    let permit = Fake::new(Some(1), Some(Judgement::Holds));
    let (judged, unjudged) = (open(&context, Some(&permit)), open(&context, None));
    let mut now = Instant::now();
    judge_all(&context.metrics, now).await;
    assert!(!is_ended(&judged));
    // A webhook of the API server has failed once.
    for answer in [refused(), Judgement::Holds, refused()] {
        permit.says(answer);
        now += EVERY;
        judge_all(&context.metrics, now).await;
    }
    // A change has everything judged again, and the same answer is remembered.
    judge_all(&context.metrics, now + Duration::from_secs(3)).await;
    assert!(!is_ended(&judged));
    judge_all(&context.metrics, now + EVERY).await;
    assert!(is_ended(&judged) && !is_ended(&unjudged));
    // Whatever its relay makes of that.
    judged.end(Outcome::ClientReset, &"broken pipe");
    let ended = context.metrics.failures.all();
    let last = &ended[&Hop::Policy].recent[0];
    assert_eq!((last.outcome, last.detail.as_str()), (Outcome::Denied, "the token is gone"));
    unjudged.end(Outcome::Ok, &"");
}

#[tokio::test]
async fn while_nobody_answers_nothing_ends_for_a_bounded_time() {
    let context = ListenerContext::without_nodes();
    let permit = Fake::new(Some(1), Some(unanswered()));
    let (record, now) = (open(&context, Some(&permit)), Instant::now());
    judge_all(&context.metrics, now + UNANSWERED - Duration::from_secs(1)).await;
    assert!(!is_ended(&record));
    permit.says(Judgement::Holds);
    judge_all(&context.metrics, now + UNANSWERED).await;
    permit.says(unanswered());
    judge_all(&context.metrics, now + 2 * UNANSWERED - Duration::from_secs(1)).await;
    assert!(!is_ended(&record), "it was known to hold since");
    judge_all(&context.metrics, now + 2 * UNANSWERED + Duration::from_secs(1)).await;
    assert!(is_ended(&record));
    record.end(Outcome::TargetReset, &"");
    let detail = context.metrics.failures.all()[&Hop::Policy].recent[0].detail.clone();
    assert_eq!(detail, "its right could not be judged for 15 min: no answer");
}

#[tokio::test]
async fn an_api_server_that_does_not_answer_is_asked_once_for_each_caller() {
    let context = ListenerContext::without_nodes();
    let permits: Vec<_> = [1, 1, 1, 2].map(|asker| Fake::new(Some(asker), Some(unanswered()))).into();
    let _open: Vec<_> = permits.iter().map(|permit| open(&context, Some(permit))).collect();
    judge_all(&context.metrics, Instant::now()).await;
    assert_eq!(permits[..3].iter().map(|permit| permit.asked()).sum::<usize>(), 1);
    assert_eq!(permits[3].asked(), 1);
}

#[tokio::test]
async fn a_target_that_is_not_known_now_keeps_no_other_connection_of_its_caller() {
    let context = ListenerContext::without_nodes();
    let (permits, other) =
        ([0; 3].map(|_| Fake::new(Some(1), Some(refused()))), Fake::new(Some(1), Some(gone())));
    let _open: Vec<_> = permits.iter().map(|permit| open(&context, Some(permit))).collect();
    let record = open(&context, Some(&other));
    let _open: Vec<_> = permits.iter().map(|permit| open(&context, Some(permit))).collect();
    judge_all(&context.metrics, Instant::now()).await;
    assert!(is_ended(&record));
}

#[tokio::test(start_paused = true)]
async fn a_change_is_judged_at_once_and_everything_every_15_s() {
    let context = ListenerContext::without_nodes();
    let (silent, permit) = (Fake::new(Some(1), None), Fake::new(None, Some(Judgement::Holds)));
    let (_waits, record) = (open(&context, Some(&silent)), open(&context, Some(&permit)));
    let (changed, stop) = (Arc::<Notify>::default(), CancellationToken::new());
    let judging = tokio::spawn(judge_open(context.metrics.clone(), changed.clone(), stop.clone()));
    while silent.asked() == 0 {
        tokio::task::yield_now().await;
    }
    // The API server does not answer.
    permit.says(gone());
    changed.notify_one();
    let ended = tokio::time::timeout(Duration::from_secs(1), record.aborted()).await.expect("at once");
    assert_eq!(ended.outcome, Outcome::Denied);
    silent.says(Judgement::Holds);
    changed.notify_one();
    let asked = permit.asked();
    let again = async {
        while permit.asked() < asked + 3 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::time::timeout(3 * EVERY, again).await.expect("every 15 s");
    stop.cancel();
    tokio::time::timeout(PATIENCE, judging).await.expect("it stops").unwrap();
}

#[tokio::test(start_paused = true)]
async fn one_slow_answer_delays_nobody_else() {
    let queued = LONGEST * 2 + Duration::from_secs(1);
    for (slow, late) in [(AT_A_TIME - 1, Duration::from_secs(1)), (2 * AT_A_TIME, queued)] {
        let context = ListenerContext::without_nodes();
        let silent: Vec<_> = (0..slow).map(|number| Fake::new(Some(number as u8), None)).collect();
        let quick = Fake::new(Some(255), Some(Judgement::Holds));
        let mut open_now: Vec<_> = silent.iter().map(|permit| open(&context, Some(permit))).collect();
        open_now.push(open(&context, Some(&quick)));
        let stop = CancellationToken::new();
        let judging = tokio::spawn(judge_open(context.metrics.clone(), Arc::default(), stop.clone()));
        for round in 1..=4 {
            let asked = async {
                while quick.asked() < round {
                    sleep(Duration::from_millis(100)).await;
                }
            };
            timeout(EVERY + late, asked).await.unwrap_or_else(|_| panic!("{slow} are slow, round {round}"));
        }
        assert!(silent.iter().all(|permit| permit.asked() > 0), "they are asked about too");
        stop.cancel();
        timeout(PATIENCE, judging).await.expect("it stops").unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_counts_for_a_caller_who_is_being_asked_about() {
    let context = ListenerContext::without_nodes();
    let (slow, permit) = (Fake::new(Some(1), None), Fake::new(Some(1), Some(Judgement::Holds)));
    let (_waits, record) = (open(&context, Some(&slow)), open(&context, Some(&permit)));
    let (changed, stop) = (Arc::<Notify>::default(), CancellationToken::new());
    let judging = tokio::spawn(judge_open(context.metrics.clone(), changed.clone(), stop.clone()));
    while slow.asked() == 0 {
        tokio::task::yield_now().await;
    }
    // Its answer is under way, and was perhaps given before.
    slow.says(Judgement::Holds);
    permit.says(gone());
    changed.notify_one();
    let ended = timeout(LONGEST + Duration::from_secs(1), record.aborted()).await.expect("not 15 s later");
    assert_eq!(ended.outcome, Outcome::Denied);
    stop.cancel();
    timeout(PATIENCE, judging).await.expect("it stops").unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_question_that_nobody_answers_does_not_stand_for_a_caller_for_ever() {
    let context = ListenerContext::without_nodes();
    let (silent, permit) = (Fake::new(Some(1), Some(unanswered())), Fake::new(Some(1), Some(gone())));
    let (_first, record) = (open(&context, Some(&silent)), open(&context, Some(&permit)));
    let judged = async {
        while !is_ended(&record) {
            judge_all(&context.metrics, Instant::now()).await;
        }
    };
    timeout(UNANSWERED, judged).await.expect("within a few rounds");
}

#[tokio::test(start_paused = true)]
async fn one_permit_is_judged_until_it_is_withdrawn() {
    let (permit, turns) = (Fake::new(None, Some(Judgement::Holds)), Arc::new(Semaphore::new(1)));
    let judging = |permit: Arc<Fake>| {
        let turns = turns.clone();
        tokio::spawn(async move { until_withdrawn(permit, &turns).await })
    };
    let mut judged = judging(permit.clone());
    assert!(timeout(10 * APART, &mut judged).await.is_err());
    assert!((10..=14).contains(&permit.asked()), "{}", permit.asked());
    permit.says(refused());
    let reason = timeout(2 * APART, judged).await.expect("when it is said twice").unwrap();
    assert_eq!(reason, "the token is gone");
    let silent = judging(Fake::new(None, None));
    let reason = timeout(UNANSWERED + APART + 2 * LONGEST, silent).await.expect("in the end").unwrap();
    assert_eq!(reason, "its right could not be judged for 15 min: no answer within 10 s");
}
