//! `cargo xtask demo`; see `postern_tests::demo`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    postern_tests::demo::main()
}
