//! The device functions of the proxy path (`kernels/include/switchyard/comm/proxy.h`), compiled for the
//! host, for tests. Handles are passed as pointers to a `sy_proxy_peer`.

use std::ffi::{CStr, c_char, c_void};

#[cfg(has_cxx)]
unsafe extern "C" {
    fn sy_proxy_test_put(peer: *const c_void, lane: u32, offset: u64, num_bytes: u64) -> u32;
    fn sy_proxy_test_put_from(
        peer: *const c_void,
        lane: u32,
        offset: u64,
        source: u32,
        source_offset: u64,
        num_bytes: u64,
    ) -> u32;
    fn sy_proxy_test_put_add(
        peer: *const c_void,
        lane: u32,
        offset: u64,
        num_bytes: u64,
        counter: u64,
        value: u64,
    ) -> u32;
    fn sy_proxy_test_put_signal(
        peer: *const c_void,
        lane: u32,
        offset: u64,
        num_bytes: u64,
        word: u64,
        value: u64,
    ) -> u32;
    fn sy_proxy_test_get(peer: *const c_void, lane: u32, offset: u64, num_bytes: u64) -> u32;
    fn sy_proxy_test_add(peer: *const c_void, lane: u32, offset: u64, value: u64) -> u32;
    fn sy_proxy_test_signal(peer: *const c_void, lane: u32, offset: u64, value: u64) -> u32;
    fn sy_proxy_test_quiet(peer: *const c_void, lane: u32) -> u32;
    fn sy_proxy_test_is_quiet(peer: *const c_void, lane: u32) -> u32;
    fn sy_proxy_test_check(lane: *const c_void) -> *const c_char;
    fn sy_proxy_test_check_peer(peer: *const c_void) -> *const c_char;
    fn sy_proxy_test_layout(out: *mut u64);
    fn sy_proxy_test_produce(params: *const c_void);
}

/// The device functions. Each returns a `SY_PROXY_*`.
///
/// All functions are unsafe: the handle must be valid, with everything it points to.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the names are those of the device functions")]
pub struct Driver {
    pub put: unsafe extern "C" fn(*const c_void, u32, u64, u64) -> u32,
    pub put_from: unsafe extern "C" fn(*const c_void, u32, u64, u32, u64, u64) -> u32,
    pub put_add: unsafe extern "C" fn(*const c_void, u32, u64, u64, u64, u64) -> u32,
    pub put_signal: unsafe extern "C" fn(*const c_void, u32, u64, u64, u64, u64) -> u32,
    pub get: unsafe extern "C" fn(*const c_void, u32, u64, u64) -> u32,
    pub add: unsafe extern "C" fn(*const c_void, u32, u64, u64) -> u32,
    pub signal: unsafe extern "C" fn(*const c_void, u32, u64, u64) -> u32,
    pub quiet: unsafe extern "C" fn(*const c_void, u32) -> u32,
    /// Whether a quiet would return immediately: 0 or 1.
    pub is_quiet: unsafe extern "C" fn(*const c_void, u32) -> u32,
    /// The producers' kernel, from its `sy_proxy_produce_params` to its end: blocks one after the other.
    pub produce: unsafe extern "C" fn(*const c_void),
    check: unsafe extern "C" fn(*const c_void) -> *const c_char,
    check_peer: unsafe extern "C" fn(*const c_void) -> *const c_char,
    layout: unsafe extern "C" fn(*mut u64),
}

impl Driver {
    /// The device functions. `None` where there is no C++ compiler.
    #[must_use]
    pub const fn find() -> Option<Self> {
        #[cfg(has_cxx)]
        {
            Some(Self {
                put: sy_proxy_test_put,
                put_from: sy_proxy_test_put_from,
                put_add: sy_proxy_test_put_add,
                put_signal: sy_proxy_test_put_signal,
                get: sy_proxy_test_get,
                add: sy_proxy_test_add,
                signal: sy_proxy_test_signal,
                quiet: sy_proxy_test_quiet,
                is_quiet: sy_proxy_test_is_quiet,
                produce: sy_proxy_test_produce,
                check: sy_proxy_test_check,
                check_peer: sy_proxy_test_check_peer,
                layout: sy_proxy_test_layout,
            })
        }
        #[cfg(not(has_cxx))]
        {
            None
        }
    }

    /// Describes the error in a lane.
    ///
    /// # Safety
    /// `lane` points to a `sy_proxy_lane`.
    #[must_use]
    pub unsafe fn check(&self, lane: *const c_void) -> Option<String> {
        // SAFETY: the caller's promise.
        text_of(unsafe { (self.check)(lane) })
    }

    /// Describes the error in a peer.
    ///
    /// # Safety
    /// `peer` points to a `sy_proxy_peer`.
    #[must_use]
    pub unsafe fn check_peer(&self, peer: *const c_void) -> Option<String> {
        // SAFETY: the caller's promise.
        text_of(unsafe { (self.check_peer)(peer) })
    }

    /// Sizes, offsets and limits of the layout, in the order of `driver.cpp`.
    #[must_use]
    pub fn layout(&self) -> [u64; 27] {
        let mut out = [0; 27];
        // SAFETY: the function writes as many numbers.
        unsafe { (self.layout)(out.as_mut_ptr()) };
        out
    }
}

fn text_of(text: *const c_char) -> Option<String> {
    // SAFETY: the checks answer with null or a constant string.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text).to_string_lossy().into_owned() })
}
