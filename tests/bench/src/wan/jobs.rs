//! All places in all rounds. Each is a job: a process with a testbed of its own, so that slow paths, which leave the CPUs
//! alone, are measured several at a time.
use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use postern_testbed::id::{Id, Kind};
use postern_testbed::supervisor;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use super::{PLACES, Place};
use crate::line::Peer;
use crate::options::Options;
use crate::record::Record;

/// The longest that one job may take.
const LIMIT: Duration = Duration::from_secs(1800);

struct Job {
    round: usize,
    place: &'static Place,
}

/// What the jobs have given so far.
struct Progress<'a> {
    options: &'a Options,
    args: &'a [OsString],
    /// Where jobs leave their values.
    folder: &'a Path,
    start: Instant,
    jobs: usize,
    state: Mutex<State>,
}

struct State {
    queue: VecDeque<Job>,
    record: Record,
    done: usize,
    /// A job was interrupted.
    ended: Option<ExitCode>,
}

/// The values, or the code with which an interrupted run ended.
pub(crate) fn run_all(options: &Options, args: &[OsString], folder: &Path) -> Result<Record, ExitCode> {
    let mut order = StdRng::seed_from_u64(options.seed);
    let (mut fast, mut slow) = (VecDeque::new(), VecDeque::new());
    for round in 1..=options.rounds {
        let mut places: Vec<&'static Place> = PLACES.iter().collect();
        places.shuffle(&mut order);
        for place in places {
            let queue = if place.is_fast() && !options.smoke { &mut fast } else { &mut slow };
            queue.push_back(Job { round, place });
        }
    }
    let mut progress = Progress {
        options,
        args,
        folder,
        start: Instant::now(),
        jobs: fast.len() + slow.len(),
        state: Mutex::new(State { queue: fast, record: Record::default(), done: 0, ended: None }),
    };
    progress.work();
    progress.state.get_mut().unwrap_or_else(PoisonError::into_inner).queue = slow;
    std::thread::scope(|scope| {
        for _ in 0..options.at_once {
            scope.spawn(|| progress.work());
        }
    });
    let state = progress.state.into_inner().unwrap_or_else(PoisonError::into_inner);
    state.ended.map_or(Ok(state.record), Err)
}

impl Progress<'_> {
    fn work(&self) {
        let lock = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let job = {
                let mut state = lock();
                if state.ended.is_some() {
                    return;
                }
                state.queue.pop_front()
            };
            let Some(Job { round, place }) = job else { return };
            let measured = self.measure(round, place);
            let mut state = lock();
            state.done += 1;
            let seconds = self.start.elapsed().as_secs();
            let (done, jobs, title) = (state.done, self.jobs, place.title);
            println!("[{seconds:>4} s] {done} of {jobs}: {title}, round {round} of {}", self.options.rounds);
            match measured {
                Ok(Ok(values)) => state.record.add(values),
                Ok(Err(code)) => state.ended = Some(code),
                Err(error) => {
                    println!("  {title}: {error:#}");
                    // After it come logs.
                    let error = format!("{error:#}").lines().next().unwrap_or_default().to_owned();
                    for peer in Peer::FAR.into_iter().filter(|peer| self.options.wants_peer(*peer)) {
                        for line in place.lines() {
                            state.record.failed(&line.id, peer, &error);
                        }
                    }
                }
            }
        }
    }

    /// The values, or the code with which an interrupted job ended.
    fn measure(&self, round: usize, place: &Place) -> Result<Result<Record, ExitCode>> {
        let id = Id::new(Kind::Test);
        let values = self.folder.join(format!("{round}-{}.json", place.id));
        // Another order of the peers in each.
        let number = PLACES.iter().position(|other| other.id == place.id).unwrap_or_default();
        let seed = self.options.seed.wrapping_add((round * PLACES.len() + number) as u64);
        let mut command = supervisor::this_program(["--run", &id.to_string()])?;
        command.args(self.args).args(["--seed", &seed.to_string(), "--place", place.id]);
        command.arg("--values").arg(&values);
        let code = supervisor::supervise(place.title, &id, command, LIMIT, false)?;
        if code != ExitCode::SUCCESS {
            return Ok(Err(code));
        }
        Record::load(&values).map(Ok)
    }
}
