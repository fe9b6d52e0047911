//! Memory that the loader frees goes back to the kernel.
//!
//! aya up to 0.14 parses all types of the kernel into some 15 MB of small allocations for each `EbpfLoader`, also for one that
//! is then told not to use them (aya-rs/aya#1172). Later versions read them only where they are needed, but need Rust 1.98.
#![expect(unsafe_code, reason = "no crate has a safe function for these")]

/// Call it before the loader is made. After large buffers were freed, glibc would keep twice their size in each of its heaps.
/// These thresholds are enough for the buffers of bulk transfers to be used again, as
/// [`tunnel_runtime::memory::reuse_freed`] explains. Those of the environment have precedence.
pub(super) fn keep_little() {
    #[cfg(target_env = "gnu")]
    if ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"]
        .iter()
        .all(|name| std::env::var_os(name).is_none())
    {
        // SAFETY: it takes two numbers, and allocations are right with the old ones and the new. A server comes here first
        // while it has one thread, in `give_up_capabilities`; later calls write the same numbers.
        unsafe {
            nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, 1 << 20);
            nix::libc::mallopt(nix::libc::M_TRIM_THRESHOLD, 8 << 20);
        }
    }
}

/// Call it after the loader was dropped, on its thread. mimalloc would keep what was freed until something else is freed.
pub(super) fn give_back() {
    // SAFETY: it takes no pointer, and changes only memory that nothing uses. The programs allocate with mimalloc there.
    #[cfg(target_env = "musl")]
    unsafe {
        libmimalloc_sys::mi_collect(true);
    }
}
