//! The running kernel.

use nix::sys::utsname::uname;

/// Returns the output of `uname -r`; empty if it cannot be read.
pub fn release() -> String {
    uname().map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns the major and minor version; `None` if [`release`] has none.
pub fn version() -> Option<(u32, u32)> {
    parse(&release())
}

/// True if this program runs under emulation (qemu-user, which supports few socket options), because its architecture
/// is not the kernel's. False if the kernel does not report its architecture (before Linux 6.1).
pub fn emulated() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/arch").is_ok_and(|arch| arch.trim() != std::env::consts::ARCH)
}

fn parse(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|character: char| !character.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_distributions_have_two_numbers() {
        assert_eq!(parse("3.10.0-1160.el7.x86_64"), Some((3, 10)));
        assert_eq!(parse("6.1-rc3"), Some((6, 1)));
        assert_eq!(parse("6.18.44-fc-v669"), Some((6, 18)));
        assert_eq!(parse("6"), None);
        assert_eq!(parse(""), None);
        assert!(version().is_some(), "{}", release());
        assert!(!emulated(), "tests run on their own architecture");
    }
}
