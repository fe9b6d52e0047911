//! `aya::Pod` for the map types, which may be copied to and from the kernel byte by byte.
#![expect(unsafe_code, reason = "aya::Pod is an unsafe trait")]

use crate::{Mapping, Prefix, V4, V6};

// SAFETY: repr(transparent) over u32: any bit pattern is valid and there is no padding.
unsafe impl aya::Pod for V4 {}
// SAFETY: repr(transparent) over [u32; 4]: any bit pattern is valid and there is no padding.
unsafe impl aya::Pod for V6 {}
// SAFETY: repr(C) of u32 words only; the size asserts in lib.rs prove there is no padding.
unsafe impl aya::Pod for Mapping<V4> {}
// SAFETY: as above.
unsafe impl aya::Pod for Mapping<V6> {}
// SAFETY: as above.
unsafe impl aya::Pod for Prefix<V4> {}
// SAFETY: as above.
unsafe impl aya::Pod for Prefix<V6> {}
