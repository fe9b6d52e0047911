//! Lines that a running scenario prints on standard output for the runner.

/// Prefix of a line with a measured value, shown even if the scenario passes.
pub const FIGURE: &str = "figure: ";
/// Prefix of a line that is shown while the scenario runs.
pub const PROGRESS: &str = "progress: ";

pub fn figure(text: &str) {
    println!("{FIGURE}{text}");
}

/// Reports what the scenario leaves out on this machine; `cargo xtask test` has it on its last line.
pub fn skipped(reason: &str) {
    progress(&format!("SKIPPED {reason}"));
}

/// Reports the progress of a long scenario.
pub fn progress(text: &str) {
    println!("{PROGRESS}{text}");
}
