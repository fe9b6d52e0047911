//! Links the replacement of getrandom(2).

fn main() {
    println!("cargo:rerun-if-changed=src/entropy.c");
    for object in cc::Build::new().file("src/entropy.c").compile_intermediates() {
        // As an object: of a library the linker would leave out what only weak references name, such as std's.
        println!("cargo:rustc-link-arg-bins={}", object.display());
    }
}
