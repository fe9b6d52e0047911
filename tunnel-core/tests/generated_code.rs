//! The generated protocol code is checked in; this test regenerates it and compares.
//! `POSTERN_REGENERATE=1 cargo test -p tunnel-core --test generated_code` updates it.

use std::{fs, path::Path};

#[test]
fn generated_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().expect("temp dir");
    let descriptors = protox::compile(["postern/tunnel/v1/tunnel.proto"], [root.join("proto")])
        .expect("the .proto file compiles");
    tonic_prost_build::configure()
        .out_dir(out.path())
        .bytes(".postern.tunnel.v1.Segment")
        .skip_debug([".postern.tunnel.v1.EnrollRequest"])
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)
        .expect("code generation");
    let fresh = fs::read_to_string(out.path().join("postern.tunnel.v1.rs")).expect("generated file");
    let checked_in = root.join("src/proto/generated.rs");
    if std::env::var_os("POSTERN_REGENERATE").is_some() {
        fs::write(&checked_in, &fresh).expect("write the generated file");
    }
    let current = fs::read_to_string(&checked_in).unwrap_or_default();
    assert!(
        current == fresh,
        "src/proto/generated.rs differs from proto/: run POSTERN_REGENERATE=1 cargo test -p tunnel-core --test generated_code"
    );
}
