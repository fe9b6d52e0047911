//! Unique names. The name of every namespace, cgroup and folder of a run begins with the run's [`Id`], which contains
//! the process ID of the run's owner, so that leftovers of dead runs can be told from live ones.
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, Result, ensure};
use rand::Rng as _;

/// Names of the programs that own runs.
const OWNERS: [&str; 3] = ["scenarios", "bench", "demo"];

/// Purpose of a run. Tests never remove a demo, nor a demo the tests' runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A scenario, or a benchmark.
    Test,
    /// `cargo xtask demo`.
    Demo,
}

/// `postern-test-PID-RANDOM` or `postern-demo-PID-RANDOM`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Id {
    kind: Kind,
    owner: u32,
    unique: u32,
}

impl Id {
    /// A new name owned by this process.
    pub fn new(kind: Kind) -> Self {
        Self { kind, owner: std::process::id(), unique: rand::rng().random() }
    }

    pub fn dir(&self) -> PathBuf {
        std::env::temp_dir().join(self.to_string())
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Reports whether the process that owns this run is still alive.
    pub fn owner_is_alive(&self) -> bool {
        let cmdline = std::fs::read(Path::new("/proc").join(self.owner.to_string()).join("cmdline"));
        // A process ID may have been reused by another program.
        cmdline.is_ok_and(|line| {
            let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
            OWNERS.iter().any(|owner| program.ends_with(owner.as_bytes()))
        })
    }

    /// Parses the ID at the start of `name`, if it is one of ours.
    pub fn of_name(name: &str) -> Option<Self> {
        let mut parts = name.splitn(5, '-');
        let id = [parts.next()?, parts.next()?, parts.next()?, parts.next()?].join("-");
        id.parse().ok()
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Test => "test",
            Kind::Demo => "demo",
        };
        write!(f, "postern-{kind}-{}-{:08x}", self.owner, self.unique)
    }
}

impl FromStr for Id {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split('-').collect();
        ensure!(parts.len() == 4 && parts[0] == "postern", "not the name of a run: {text:?}");
        let kind = match parts[1] {
            "test" => Kind::Test,
            "demo" => Kind::Demo,
            other => anyhow::bail!("not the name of a run: kind {other:?}"),
        };
        let owner = parts[2].parse().with_context(|| format!("process id in {text:?}"))?;
        ensure!(parts[3].len() == 8, "not the name of a run: {text:?}");
        let unique = u32::from_str_radix(parts[3], 16).with_context(|| format!("number in {text:?}"))?;
        Ok(Self { kind, owner, unique })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        let id = Id::new(Kind::Test);
        assert_eq!(id.to_string().parse::<Id>().unwrap(), id);
        assert_eq!(Id::of_name(&format!("{id}-edge-1")), Some(id.clone()));
        assert_eq!(Id::of_name(&id.to_string()), Some(id));
    }

    #[test]
    fn foreign_names_are_ignored() {
        for name in
            ["postern", "postern-test", "postern-test-x-00000000", "edge-1", "postern-test-1-2", "cni-1-2-3"]
        {
            assert_eq!(Id::of_name(name), None, "{name}");
        }
    }

    #[test]
    fn only_our_programs_own_runs() {
        // This test's process is alive, but is none of OWNERS.
        assert!(!Id::new(Kind::Test).owner_is_alive());
    }
}
