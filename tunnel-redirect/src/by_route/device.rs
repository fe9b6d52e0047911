//! The device that the routes hang on. It is bound to this process: however the process ends, the kernel removes the
//! device, and with it the routes, at once. No packet ever passes it.

use std::fs::File;
use std::io;

use nix::net::if_::if_nametoindex;

use super::system;

const PREFIX: &str = "postern";
/// Servers on one host. The kernel gives out the lowest free number.
pub(super) const MOST: u32 = 256;

pub(super) struct Device {
    /// Its end is the end of the device.
    _file: File,
    pub(super) name: String,
    pub(super) number: u32,
    pub(super) index: u32,
}

impl Device {
    pub(super) fn create() -> io::Result<Self> {
        let (file, name) = system::tun(c"postern%d")?;
        let number = name.strip_prefix(PREFIX).and_then(|number| number.parse().ok());
        let number = number
            .filter(|number| *number < MOST)
            .ok_or_else(|| io::Error::other(format!("the kernel named the device {name}")))?;
        let index = if_nametoindex(name.as_str())?;
        Ok(Self { _file: file, name, number, index })
    }
}

/// True if a process has the device with this number.
pub(super) fn is_taken(number: u32) -> bool {
    if_nametoindex(format!("{PREFIX}{number}").as_str()).is_ok()
}
