//! All places in all rounds. Each is a job: a process with a testbed of its own, so that slow paths, which leave the CPUs
//! alone, are measured several at a time.
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
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

/// Maximum bits a second of all jobs together, unless one alone moves more: the CPUs have to stay free enough for all.
const MOST_LOAD: u64 = 500_000_000;
/// The longest that one job may take.
const LIMIT: Duration = Duration::from_secs(1800);

struct Job {
    round: usize,
    place: &'static Place,
}

/// The jobs, and their values so far.
struct Progress<'a> {
    options: &'a Options,
    args: &'a [OsString],
    /// Folder in which jobs leave their values.
    folder: &'a Path,
    start: Instant,
    jobs: usize,
    state: Mutex<State>,
    /// Signalled when a job has ended.
    ended: Condvar,
}

struct State {
    queue: VecDeque<Job>,
    /// The load of those that run.
    running: Vec<u64>,
    record: Record,
    done: usize,
    /// Exit code of a job that was interrupted.
    interrupted: Option<ExitCode>,
}

impl State {
    /// The next job that leaves the CPUs to those that run: the one with the most load, or it would wait to the end and then
    /// run alone.
    fn next(&mut self) -> Option<Job> {
        let room = MOST_LOAD.saturating_sub(self.running.iter().sum());
        let fits = |job: &Job| self.running.is_empty() || job.place.load() <= room;
        let fitting = self.queue.iter().enumerate().filter(|(_, job)| fits(job));
        let (index, _) = fitting.max_by_key(|(index, job)| (job.place.load(), Reverse(*index)))?;
        let job = self.queue.remove(index)?;
        self.running.push(job.place.load());
        Some(job)
    }
}

/// The values, or the code with which an interrupted run ended.
pub(crate) fn run_all(options: &Options, args: &[OsString], folder: &Path) -> Result<Record, ExitCode> {
    let mut order = StdRng::seed_from_u64(options.seed);
    let mut queue = VecDeque::new();
    for round in 1..=options.rounds {
        let mut places: Vec<&'static Place> = options.places().collect();
        places.shuffle(&mut order);
        queue.extend(places.into_iter().map(|place| Job { round, place }));
    }
    let progress = Progress {
        options,
        args,
        folder: options.keep.as_deref().unwrap_or(folder),
        start: Instant::now(),
        jobs: queue.len(),
        state: Mutex::new(State {
            queue,
            running: Vec::new(),
            record: Record::default(),
            done: 0,
            interrupted: None,
        }),
        ended: Condvar::new(),
    };
    std::thread::scope(|scope| {
        for _ in 0..options.at_once {
            scope.spawn(|| progress.work());
        }
    });
    let state = progress.state.into_inner().unwrap_or_else(PoisonError::into_inner);
    state.interrupted.map_or(Ok(state.record), Err)
}

impl Progress<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a job to do; None: there is none left.
    fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if state.interrupted.is_some() || state.queue.is_empty() {
                return None;
            }
            if let Some(job) = state.next() {
                return Some(job);
            }
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self) {
        while let Some(Job { round, place }) = self.next() {
            let measured = self.measure(round, place);
            let mut state = self.state();
            if let Some(index) = state.running.iter().position(|load| *load == place.load()) {
                state.running.swap_remove(index);
            }
            self.ended.notify_all();
            state.done += 1;
            let seconds = self.start.elapsed().as_secs();
            let (done, jobs, title) = (state.done, self.jobs, place.title);
            println!("[{seconds:>4} s] {done} of {jobs}: {title}, round {round} of {}", self.options.rounds);
            match measured {
                Ok(Ok(values)) => state.record.add(values),
                Ok(Err(code)) => state.interrupted = Some(code),
                Err(error) => {
                    println!("  {title}: {error:#}");
                    // Logs follow the first line.
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
        if values.exists() {
            return Record::load(&values).map(Ok);
        }
        // Each job has another order of the peers.
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
