//! The command line of `bench`.
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use crate::line::{Group, Peer};
use crate::peers::Programs;
use crate::wan::{PLACES, Place};

/// Rounds of a full run: a median of five has two on either side.
const ROUNDS: usize = 5;
/// Name of the group of everything that is measured without a wide-area path.
pub(crate) const HOST: &str = "host";
/// Wide-area paths that are measured at the same time, as far as the CPUs suffice for them.
const AT_ONCE: usize = 8;

/// Parsed arguments of the program `bench`; `cargo xtask bench` gives them.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Number of times that every peer is measured.
    pub(crate) rounds: usize,
    /// True to only check that it works.
    pub(crate) smoke: bool,
    /// Seed of the order of peers.
    pub(crate) seed: u64,
    pub(crate) out: PathBuf,
    pub(crate) command: String,
    /// The commit that was measured, as git names it.
    pub(crate) commit: String,
    /// True to fail when a peer is not installed or gives no value.
    pub(crate) all_peers: bool,
    /// Maximum number of wide-area paths that are measured at the same time.
    pub(crate) at_once: usize,
    /// The only place that is measured; None for everything that is not a wide-area path.
    pub(crate) place: Option<&'static Place>,
    /// The wide-area paths that are measured; all if there are none.
    paths: Vec<&'static Place>,
    /// Folder that keeps the values of wide-area paths, for a run that goes on after it was interrupted.
    pub(crate) keep: Option<PathBuf>,
    /// File in which a worker leaves its values.
    pub(crate) values: PathBuf,
    pub(crate) programs: Programs,
    groups: Vec<Group>,
    peers: Vec<Peer>,
}

impl Options {
    /// Reads the arguments; errors list the choices.
    pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let mut options = Self {
            rounds: 0,
            smoke: false,
            seed: rand::random_range(0..1_000_000),
            out: PathBuf::from("target/bench"),
            command: "cargo xtask bench".to_owned(),
            commit: "unknown".to_owned(),
            all_peers: false,
            at_once: AT_ONCE,
            place: None,
            paths: Vec::new(),
            keep: None,
            values: PathBuf::new(),
            programs: Programs::default(),
            groups: Vec::new(),
            peers: Vec::new(),
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let arg = arg.into_string().map_err(|arg| anyhow::anyhow!("not UTF-8: {}", arg.display()))?;
            if arg == "--smoke" {
                options.smoke = true;
                continue;
            }
            if arg == "--all-peers" {
                options.all_peers = true;
                continue;
            }
            let value = args.next().with_context(|| format!("{arg} needs a value"))?;
            let value =
                value.into_string().map_err(|value| anyhow::anyhow!("not UTF-8: {}", value.display()))?;
            match arg.as_str() {
                "--rounds" => {
                    options.rounds = value.parse().with_context(|| format!("--rounds {value:?}"))?;
                }
                "--seed" => options.seed = value.parse().with_context(|| format!("--seed {value:?}"))?,
                "--out" => options.out = value.into(),
                "--command" => options.command = value,
                "--commit" => options.commit = value,
                "--at-once" => {
                    options.at_once = value.parse().with_context(|| format!("--at-once {value:?}"))?;
                }
                "--place" => options.place = Some(named("--place", &value)?),
                "--path" => options.paths.push(named("--path", &value)?),
                "--keep" => options.keep = Some(value.into()),
                "--values" => options.values = value.into(),
                "--program" => options.programs.found(&value)?,
                "--missing" => options.programs.missing(&value)?,
                "--only" => options.only(&value)?,
                _ => bail!("unknown argument {arg:?}"),
            }
        }
        if options.rounds == 0 {
            options.rounds = if options.smoke { 1 } else { ROUNDS };
        }
        Ok(options)
    }

    fn only(&mut self, name: &str) -> Result<()> {
        if name == HOST {
            self.groups.extend(Group::ALL.into_iter().filter(|group| group.is_on_host()));
            return Ok(());
        }
        let group = Group::ALL.into_iter().find(|group| group.name() == name);
        let peer = Peer::ALL.into_iter().find(|peer| peer.name() == name);
        match (group, peer) {
            (Some(group), _) => self.groups.push(group),
            (None, Some(peer)) => self.peers.push(peer),
            (None, None) => bail!(
                "--only {name:?}: there are the groups {}, {HOST} for all but wan, and the peers {}",
                Group::ALL.map(Group::name).join(", "),
                Peer::ALL.map(Peer::name).join(", ")
            ),
        }
        Ok(())
    }

    /// True if a group is measured. A named path asks for wide-area paths alone, unless a group is named too.
    pub(crate) fn wants_group(&self, group: Group) -> bool {
        if self.groups.is_empty() && !self.paths.is_empty() {
            return group == Group::Wan;
        }
        self.groups.is_empty() || self.groups.contains(&group)
    }

    /// The wide-area paths to measure.
    pub(crate) fn places(&self) -> impl Iterator<Item = &'static Place> {
        let wanted =
            |place: &&Place| self.paths.is_empty() || self.paths.iter().any(|path| path.id == place.id);
        PLACES.iter().filter(wanted)
    }

    pub(crate) fn wants_peer(&self, peer: Peer) -> bool {
        self.peers.is_empty() || self.peers.contains(&peer)
    }
}

fn named(option: &str, id: &str) -> Result<&'static Place> {
    let place = PLACES.iter().find(|place| place.id == id);
    place.with_context(|| {
        format!("{option} {id:?}: there are {}", PLACES.each_ref().map(|place| place.id).join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Options> {
        Options::parse(args.iter().map(OsString::from))
    }

    #[test]
    fn only_restricts_groups_and_peers() {
        let all = parse(&[]).unwrap();
        assert!(Group::ALL.into_iter().all(|group| all.wants_group(group)) && all.rounds == ROUNDS);
        assert!(Peer::ALL.into_iter().all(|peer| all.wants_peer(peer)));
        let some = parse(&["--only", "bulk", "--only", "postern", "--only", "held", "--smoke"]).unwrap();
        assert!(some.wants_group(Group::Bulk) && some.wants_group(Group::Held));
        assert!(!some.wants_group(Group::Beside) && !some.wants_peer(Peer::Direct));
        assert!(some.wants_peer(Peer::Postern) && some.rounds == 1);
        let host = parse(&["--only", "host"]).unwrap();
        assert!(Group::ALL.into_iter().all(|group| host.wants_group(group) == (group != Group::Wan)));
    }

    #[test]
    fn paths_that_are_named_are_all_that_is_measured() {
        let some = parse(&["--path", "lte", "--path", "50ms-100m-1", "--only", "postern"]).unwrap();
        assert_eq!(some.places().map(|place| place.id).collect::<Vec<_>>(), ["50ms-100m-1", "lte"]);
        assert!(Group::ALL.into_iter().all(|group| some.wants_group(group) == (group == Group::Wan)));
        assert_eq!(parse(&[]).unwrap().places().count(), PLACES.len());
        let error = parse(&["--path", "dsl"]).unwrap_err().to_string();
        assert!(error.contains("dsl") && error.contains("60ms-2-1m"), "{error}");
    }

    #[test]
    fn errors_list_the_choices() {
        let error = parse(&["--only", "speed"]).unwrap_err().to_string();
        assert!(error.contains("speed") && error.contains("bulk") && error.contains("rathole"), "{error}");
        assert!(parse(&["--rounds", "many"]).is_err());
        assert!(parse(&["--rounds"]).is_err());
        assert!(parse(&["--fast", "1"]).is_err());
    }

    #[test]
    fn programs_are_found_or_missing_with_a_reason() {
        let options = parse(&["--program", "rathole=/bin/rathole", "--missing", "haproxy=no apt"]).unwrap();
        assert_eq!(options.programs.path("rathole"), Ok(PathBuf::from("/bin/rathole")));
        assert_eq!(options.programs.path("haproxy"), Err("no apt".to_owned()));
        assert!(options.programs.path("konnectivity").is_err());
    }
}
