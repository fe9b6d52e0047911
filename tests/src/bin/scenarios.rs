//! Runs the scenarios; see `postern_tests::runner`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    postern_tests::runner::main(std::env::args_os().collect())
}
