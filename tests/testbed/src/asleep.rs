//! Simulates a machine that was suspended, for one program: the offsets of a time namespace cannot be changed once a
//! process is in it, so the program gets another clock_gettime(2).
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::netns::run;
use crate::topology::Testbed;

const SOURCE: &str = include_str!("asleep.cpp");

/// The clock of the programs that run with [`Self::environment`].
#[derive(Debug)]
pub struct Asleep {
    library: PathBuf,
    time: PathBuf,
}

impl Asleep {
    /// Compiles the replacement of clock_gettime(2).
    pub fn new(testbed: &Testbed) -> Result<Self> {
        let file = |name: &str| testbed.dir().join(name);
        let (source, library) = (file("asleep.cpp"), file("asleep.so"));
        fs::write(&source, SOURCE).with_context(|| format!("writing {}", source.display()))?;
        run(Command::new("g++").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source))?;
        let asleep = Self { library, time: file("asleep") };
        asleep.set(Duration::ZERO)?;
        Ok(asleep)
    }

    /// Environment variables of the program.
    pub fn environment(&self) -> [(&'static str, String); 2] {
        [
            ("LD_PRELOAD", self.library.display().to_string()),
            ("POSTERN_ASLEEP", self.time.display().to_string()),
        ]
    }

    /// Sets how long the machine has been suspended since its boot.
    pub fn set(&self, time: Duration) -> Result<()> {
        let next = self.time.with_extension("next");
        fs::write(&next, time.as_secs().to_string())
            .with_context(|| format!("writing {}", next.display()))?;
        fs::rename(&next, &self.time).with_context(|| format!("replacing {}", self.time.display()))
    }
}
