//! Regenerates the protocol code and compares it with the checked-in code.
//! `POSTERN_REGENERATE=1 cargo test -p tunnel-link --test generated_code` updates it.

use std::{fs, path::Path};

use tonic_prost_build::Builder;

/// Regenerates the code of one .proto file below proto/, and compares it with the file in src/proto/.
fn current(proto: &str, generated: &str, checked_in: &str, configure: fn(Builder) -> Builder) {
    // Tests run in the crate's folder. Where it was when this was compiled may be another place by now.
    let root = Path::new(".");
    let out = tempfile::tempdir().expect("temp dir");
    let descriptors = protox::compile([proto], [root.join("proto")]).expect("the .proto file compiles");
    configure(tonic_prost_build::configure())
        .out_dir(out.path())
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)
        .expect("code generation");
    let fresh = fs::read_to_string(out.path().join(generated)).expect("generated file");
    let path = root.join("src/proto").join(checked_in);
    if std::env::var_os("POSTERN_REGENERATE").is_some() {
        fs::write(&path, &fresh).expect("write the generated file");
    }
    assert!(
        fs::read_to_string(&path).unwrap_or_default() == fresh,
        "src/proto/{checked_in} differs from proto/: run POSTERN_REGENERATE=1 cargo test -p tunnel-link --test generated_code"
    );
}

#[test]
fn generated_code_is_current() {
    current("postern/tunnel/v1/tunnel.proto", "postern.tunnel.v1.rs", "generated.rs", |builder| {
        builder.bytes(".postern.tunnel.v1.Segment").skip_debug([".postern.tunnel.v1.EnrollRequest"])
    });
}

#[test]
fn generated_code_of_konnectivity_is_current() {
    current("konnectivity/konnectivity.proto", "_.rs", "konnectivity_generated.rs", |builder| {
        // A generated `connect` would have the same name as the method Connect.
        builder.bytes(".Data").build_transport(false)
    });
}
