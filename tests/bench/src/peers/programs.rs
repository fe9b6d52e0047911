//! The installed programs of the peers.
use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::line::Peer;

/// Paths of the peers' programs, or the reasons why they are missing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Programs(BTreeMap<String, Result<PathBuf, String>>);

impl Programs {
    /// Notes `NAME=PATH`.
    pub(crate) fn found(&mut self, argument: &str) -> Result<()> {
        let (name, path) = argument.split_once('=').context("--program NAME=PATH")?;
        self.0.insert(name.to_owned(), Ok(path.into()));
        Ok(())
    }

    /// Notes `NAME=REASON`.
    pub(crate) fn missing(&mut self, argument: &str) -> Result<()> {
        let (name, reason) = argument.split_once('=').context("--missing NAME=REASON")?;
        self.0.insert(name.to_owned(), Err(reason.to_owned()));
        Ok(())
    }

    /// A program's file, or its folder where there are several.
    pub(crate) fn path(&self, name: &str) -> Result<PathBuf, String> {
        let unknown = || Err(format!("{name} is missing: `cargo xtask bench` installs it"));
        self.0.get(name).cloned().unwrap_or_else(unknown)
    }
}

/// The name of the program that a peer needs.
pub(crate) fn needs(peer: Peer) -> Option<&'static str> {
    match peer {
        Peer::Haproxy | Peer::HaproxyTuned => Some("haproxy"),
        Peer::Rathole => Some("rathole"),
        Peer::KonnectivityGrpc | Peer::KonnectivityHttp => Some("konnectivity"),
        Peer::Direct | Peer::Tonic | Peer::Iptables => None,
        Peer::Postern | Peer::PosternForwarded => None,
    }
}
