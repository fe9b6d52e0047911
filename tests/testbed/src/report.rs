//! What a running scenario reports on standard output, and how the runner recognises it.

/// Begins a line with a measured value, shown even when the scenario passes.
pub const FIGURE: &str = "figure: ";
/// Begins a line that is shown while the scenario runs.
pub const PROGRESS: &str = "progress: ";

pub fn figure(text: &str) {
    println!("{FIGURE}{text}");
}

/// Reports how far a long scenario is.
pub fn progress(text: &str) {
    println!("{PROGRESS}{text}");
}
