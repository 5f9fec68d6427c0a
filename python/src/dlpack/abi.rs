//! The structures of DLPack 1.x, as producers lay them out in memory.

use std::ffi::{c_char, c_int, c_void};

/// Version of a structure. Another major version means another layout.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

/// Place of the data.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    pub kind: i32,
    pub id: i32,
}

/// Element type.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// A tensor, without ownership.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device: Device,
    pub ndim: i32,
    pub dtype: DataType,
    /// `ndim` lengths.
    pub shape: *mut i64,
    /// `ndim` strides in elements, or null for a contiguous tensor.
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// A tensor with its owner, as capsules named `dltensor` hold it.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedTensor {
    pub tensor: Tensor,
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// A tensor with its owner, as capsules named `dltensor_versioned` hold it.
#[repr(C)]
#[derive(Debug)]
pub struct VersionedTensor {
    pub version: Version,
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    pub flags: u64,
    pub tensor: Tensor,
}

/// Function that a producer calls to report an error: context, kind and message.
pub type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// The functions of a producer, at `__dlpack_c_exchange_api__` of its type.
#[repr(C)]
#[derive(Debug)]
pub struct ExchangeApi {
    pub version: Version,
    pub previous: *const Self,
    pub allocate: Option<
        unsafe extern "C" fn(
            *const Tensor,
            *mut *mut VersionedTensor,
            *mut c_void,
            SetError,
        ) -> c_int,
    >,
    pub managed_from_object:
        Option<unsafe extern "C" fn(*mut c_void, *mut *mut VersionedTensor) -> c_int>,
    pub object_from_managed:
        Option<unsafe extern "C" fn(*mut VersionedTensor, *mut *mut c_void) -> c_int>,
    pub tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    pub current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: A producer's table never changes.
unsafe impl Sync for ExchangeApi {}

/// Major version of these structures.
pub const MAJOR: u32 = 1;
/// Flag of [`VersionedTensor`]: the data must not be written.
pub const READ_ONLY: u64 = 1;

/// Kinds of [`Device`].
pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;
pub const CUDA_HOST: i32 = 3;
pub const ROCM: i32 = 10;
pub const ROCM_HOST: i32 = 11;
pub const CUDA_MANAGED: i32 = 13;

/// Codes of [`DataType`].
pub const INT: u8 = 0;
pub const UINT: u8 = 1;
pub const FLOAT: u8 = 2;
pub const BFLOAT: u8 = 4;
pub const COMPLEX: u8 = 5;
pub const BOOL: u8 = 6;

const _: () = {
    assert!(size_of::<Tensor>() == 48 && std::mem::offset_of!(Tensor, byte_offset) == 40);
    assert!(size_of::<ManagedTensor>() == 64);
    assert!(
        size_of::<VersionedTensor>() == 80 && std::mem::offset_of!(VersionedTensor, tensor) == 32
    );
    assert!(size_of::<ExchangeApi>() == 56 && std::mem::offset_of!(ExchangeApi, allocate) == 16);
};
