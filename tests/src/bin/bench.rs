//! `cargo xtask bench`; see `postern_tests::bench`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    postern_tests::bench::main(&std::env::args_os().collect::<Vec<_>>())
}
