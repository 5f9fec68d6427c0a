//! `host/kernels.cpp`, compiled by this machine's C++ compiler and opened.

use std::collections::hash_map::DefaultHasher;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use kernels::abi::{ClientPeer, DevicePtr, ExpertLists, FrameGeometry, ServerPeer};
use kernels::link_calls::LinkCallsParams;
use kernels::plan::KernelParams;

/// The kernels, run on this machine's processor.
pub struct Library {
    handle: *mut c_void,
}

// SAFETY: a handle of the dynamic linker, which has no thread affinity.
unsafe impl Send for Library {}
// SAFETY: looking symbols up changes nothing.
unsafe impl Sync for Library {}

/// The library, compiled once per process. `None` without a C++ compiler.
pub fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(Library::compile).as_ref()
}

impl Library {
    fn compile() -> Option<Self> {
        let object = shared_object()?;
        let path = CString::new(object.to_str().expect("path")).expect("path");
        // SAFETY: a library that was made here; its constructors have no preconditions.
        let handle = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        assert!(!handle.is_null(), "{} cannot be opened", object.display());
        Some(Self { handle })
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let text = CString::new(name).expect("name");
        // SAFETY: the handle is open, the name ends with a zero.
        let symbol = unsafe { dlsym(self.handle, text.as_ptr()) };
        assert!(!symbol.is_null(), "the library has no {name}");
        symbol
    }

    /// Launches and waits. Returns the launcher's code.
    ///
    /// # Safety
    /// Pointers in `params` are to memory of this process as large as documented, or the check fails.
    pub unsafe fn launch<P: KernelParams>(&self, params: &P) -> i32 {
        let symbol = self.symbol(&format!("sy_host_{}", P::NAME));
        // SAFETY: the function takes a pointer to these parameters and returns a code.
        let run: extern "C" fn(*const P) -> c_int = unsafe { std::mem::transmute(symbol) };
        run(params)
    }

    /// The calls of a link by one warp, to their end.
    ///
    /// # Safety
    /// The link is usable, and the other pointers are to memory of this process as large as the header says.
    pub unsafe fn link_calls(&self, params: &LinkCallsParams, any_path: bool) {
        let symbol = self.symbol("sy_host_link_calls");
        // SAFETY: the function takes these parameters and a flag.
        let run: extern "C" fn(*const LinkCallsParams, u32) =
            unsafe { std::mem::transmute(symbol) };
        run(params, u32::from(any_path));
    }

    /// Code of the check; blocks, threads, whether the kernel is tuned, and whether it is for few blocks.
    pub fn plan<P: KernelParams>(&self, params: &P) -> (i32, [u32; 4]) {
        let symbol = self.symbol(&format!("sy_host_plan_{}", P::NAME));
        // SAFETY: the function takes these parameters, dereferences none of their pointers, and writes four
        // numbers.
        let plan: extern "C" fn(*const P, *mut u32) -> c_int =
            unsafe { std::mem::transmute(symbol) };
        let mut out = [0; 4];
        (plan(params, out.as_mut_ptr()), out)
    }

    /// The header's geometry: code, and the result when the code is 0.
    pub fn geometry(&self, shape: [u32; 5]) -> Result<FrameGeometry, i32> {
        let symbol = self.symbol("sy_host_geometry");
        // SAFETY: the function reads five numbers and writes a geometry.
        let make: extern "C" fn(*const u32, *mut FrameGeometry) -> c_int =
            unsafe { std::mem::transmute(symbol) };
        let mut out: FrameGeometry = bytemuck::Zeroable::zeroed();
        match make(shape.as_ptr(), &raw mut out) {
            0 => Ok(out),
            code => Err(code),
        }
    }

    /// The header's answer to how many tokens fit.
    pub fn tokens_for_slot(&self, shape: [u32; 4], slot_bytes: u64) -> u32 {
        let symbol = self.symbol("sy_host_tokens_for_slot");
        // SAFETY: the function reads four numbers.
        let count: extern "C" fn(*const u32, u64) -> u32 = unsafe { std::mem::transmute(symbol) };
        count(shape.as_ptr(), slot_bytes)
    }

    /// The header's lists.
    pub fn lists(
        &self,
        base: DevicePtr,
        geometry: &FrameGeometry,
        num_local_experts: u32,
        max_rows: u32,
    ) -> (ExpertLists, u64) {
        let symbol = self.symbol("sy_host_lists");
        // SAFETY: the function reads a geometry and writes lists.
        let make: extern "C" fn(u64, *const FrameGeometry, u32, u32, *mut ExpertLists) -> u64 =
            unsafe { std::mem::transmute(symbol) };
        let mut out: ExpertLists = bytemuck::Zeroable::zeroed();
        let bytes = make(base.0, geometry, num_local_experts, max_rows, &raw mut out);
        (out, bytes)
    }

    /// The launchers' check of a table of servers.
    pub fn check_servers(&self, servers: &[ServerPeer]) -> i32 {
        let symbol = self.symbol("sy_host_check_servers");
        // SAFETY: the function reads this number of servers.
        let check: extern "C" fn(*const ServerPeer, u32) -> c_int =
            unsafe { std::mem::transmute(symbol) };
        check(servers.as_ptr(), servers.len() as u32)
    }

    /// The launchers' check of a table of clients.
    pub fn check_clients(&self, clients: &[ClientPeer]) -> i32 {
        let symbol = self.symbol("sy_host_check_clients");
        // SAFETY: the function reads this number of clients.
        let check: extern "C" fn(*const ClientPeer, u32) -> c_int =
            unsafe { std::mem::transmute(symbol) };
        check(clients.as_ptr(), clients.len() as u32)
    }
}

/// The compiled library, kept between processes under a name made of everything that goes in.
fn shared_object() -> Option<PathBuf> {
    // Tests of several packages, at several depths, have this file.
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|folder| folder.join("kernels"))
        .find(|kernels| kernels.join("host/kernels.cpp").exists())
        .expect("the kernels' sources");
    let mut hasher = DefaultHasher::new();
    FLAGS.hash(&mut hasher);
    for folder in ["host", "include", "cuda"] {
        hash_folder(&root.join(folder), &mut hasher);
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let object = folder.join(format!("libkernels_host-{:016x}.so", hasher.finish()));
    if object.exists() {
        return Some(object);
    }
    // Tests run in processes of their own, several at a time. One compiles, the others wait for it.
    let lock = File::create(folder.join("libkernels_host.lock")).expect("a file");
    lock.lock().expect("a lock");
    if object.exists() {
        return Some(object);
    }
    let mine = folder.join(format!("libkernels_host-{}.tmp", std::process::id()));
    let compiled = Command::new("g++")
        .current_dir(&root)
        .args(FLAGS)
        .arg("-o")
        .arg(&mine)
        .arg("host/kernels.cpp")
        .output();
    let compiled = match compiled {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            test_support::skip("cxx", "no g++ to compile the kernels for the host");
            return None;
        }
        other => other.expect("compiler starts"),
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    std::fs::rename(&mine, &object).expect("rename");
    Some(object)
}

fn hash_folder(folder: &Path, hasher: &mut DefaultHasher) {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("folder")
        .map(|entry| entry.expect("entry").path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            hash_folder(&path, hasher);
        } else {
            path.hash(hasher);
            std::fs::read(&path).expect("source").hash(hasher);
        }
    }
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
#[rustfmt::skip]
const FLAGS: [&str; 15] = [
    "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror",
    "-include", "host/shim/simt.hpp", "-Ihost/shim", "-Iinclude", "-Icuda",
];
