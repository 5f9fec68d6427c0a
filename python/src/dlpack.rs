//! Arrays of other libraries, read and written in place through DLPack.
//!
//! A type with `__dlpack_c_exchange_api__` (torch from 2.10 on) is asked through C functions, without a Python object
//! per tensor. Every other array is asked through `__dlpack__`, by versioned capsule if the library knows them.

pub mod abi;
mod describe;
mod library;
mod place;

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict};

use crate::errors::{Kind, error};
use abi::{ExchangeApi, VersionedTensor};
use describe::{DataTypeName, Description};
use library::Library;
pub use place::{Place, current_stream};

/// Element types that calls know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    F32,
    F16,
    Bf16,
    I32,
    I64,
}

impl ElementType {
    const fn data_type(self) -> abi::DataType {
        let (code, bits) = match self {
            Self::F32 => (abi::FLOAT, 32),
            Self::F16 => (abi::FLOAT, 16),
            Self::Bf16 => (abi::BFLOAT, 16),
            Self::I32 => (abi::INT, 32),
            Self::I64 => (abi::INT, 64),
        };
        abi::DataType { code, bits, lanes: 1 }
    }

    /// Bytes of an element, which is also its alignment.
    pub const fn bytes(self) -> usize {
        self.data_type().bits as usize / 8
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        DataTypeName(self.data_type()).fmt(f)
    }
}

/// An array of another library. It stays valid as long as this value and the Python object live.
pub struct Array<'a, 'py> {
    object: &'a Bound<'py, PyAny>,
    tensor: abi::Tensor,
    is_read_only: bool,
    library: Arc<Library>,
    owner: Owner,
    /// Stream of the array's work, if that is another one than the call's.
    other_stream: Option<u64>,
}

/// Keeps the memory of an array valid.
pub enum Owner {
    /// The Python object does.
    Object,
    /// The capsule does. It frees its tensor when it goes.
    Capsule { _capsule: Py<PyAny> },
    /// A tensor that this value frees.
    Managed(NonNull<VersionedTensor>),
}

// SAFETY: DLPack lets any thread call the deleter. Producers that need the interpreter attach to it.
unsafe impl Send for Owner {}
// SAFETY: A shared reference gives no access to the tensor.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Self::Managed(managed) = self {
            // SAFETY: This value owns the tensor, and its producer's deleter takes it once.
            unsafe {
                if let Some(deleter) = managed.as_ref().deleter {
                    deleter(managed.as_ptr());
                }
            }
        }
    }
}

/// A matrix in C order, with checked type, shape, strides and alignment.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    pub data: NonNull<u8>,
    pub rows: usize,
    pub cols: usize,
    pub element: ElementType,
}

// SAFETY: A matrix only says where values are. Reading and writing them is unsafe for itself.
unsafe impl Send for Matrix {}
// SAFETY: As above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// The rows from `first` on, `rows` at most.
    pub fn part(&self, first: usize, rows: usize) -> Self {
        let first = first.min(self.rows);
        let offset = first * self.cols * self.element.bytes();
        // SAFETY: The offset is at most the length of the matrix.
        let data = unsafe { self.data.add(offset) };
        Self { data, rows: rows.min(self.rows - first), ..*self }
    }

    /// Returns true if the two share a byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        let range = |of: &Self| {
            let begin = of.data.as_ptr() as usize;
            (begin, begin + of.len() * of.element.bytes())
        };
        let ((begin, end), (other_begin, other_end)) = (range(self), range(other));
        begin < other_end && other_begin < end
    }
}

/// Shape and types that an argument must have.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'e> {
    /// Name of the argument.
    pub name: &'static str,
    pub rows: Option<usize>,
    pub cols: Option<usize>,
    pub elements: &'e [ElementType],
    /// Name of the number of columns, for messages.
    pub cols_name: &'static str,
    pub place: Place,
}

impl fmt::Display for Expected<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rows {
            Some(rows) => write!(f, "[{rows}, ")?,
            None => f.write_str("[tokens, ")?,
        }
        match self.cols {
            Some(cols) => write!(f, "{cols}] of ")?,
            None => write!(f, "{}] of ", self.cols_name)?,
        }
        for (idx, element) in self.elements.iter().enumerate() {
            let separator = match idx {
                0 => "",
                idx if idx + 1 == self.elements.len() => " or ",
                _ => ", ",
            };
            write!(f, "{separator}{element}")?;
        }
        write!(f, " in C order on {}", self.place)
    }
}

impl<'a, 'py> Array<'a, 'py> {
    /// Reads the description of `object`. Python code of its library may run.
    ///
    /// With `is_kept` the memory stays valid while the [`Owner`] lives; otherwise as long as the object is not
    /// resized. The work of an array in GPU memory is ordered before later work of the stream of `place`, or before
    /// that of [`other_stream`](Self::other_stream).
    pub fn of(
        name: &'static str,
        object: &'a Bound<'py, PyAny>,
        is_kept: bool,
        place: Place,
    ) -> PyResult<Self> {
        let library = Library::of(&object.get_type());
        match library.api {
            Some(api) => {
                let mut array = Self::by_api(name, object, library, api, is_kept, place)?;
                if let Place::Gpu { ordinal, stream } = place {
                    array.other_stream = place::stream_of(api, object.py(), ordinal)
                        .filter(|&current| current != stream);
                }
                Ok(array)
            }
            None => Self::by_capsule(name, object, library, place),
        }
    }

    fn by_api(
        name: &'static str,
        object: &'a Bound<'py, PyAny>,
        library: Arc<Library>,
        api: &'static ExchangeApi,
        is_kept: bool,
        place: Place,
    ) -> PyResult<Self> {
        let py = object.py();
        // The C functions do not look at it, while `__dlpack__` does.
        let requires_grad = object.getattr(intern!(py, "requires_grad"));
        if requires_grad.is_ok_and(|value| value.is_truthy().unwrap_or(false)) {
            return Err(error(
                py,
                Kind::Argument,
                format!(
                    "{name} requires grad, but the expert service has no backward pass: call under \
                     torch.no_grad(), or pass {name}.detach()"
                ),
            ));
        }
        let mut array = Self {
            object,
            tensor: EMPTY,
            is_read_only: false,
            library,
            owner: Owner::Object,
            other_stream: None,
        };
        let pointer = object.as_ptr().cast();
        match (api.tensor_from_object, api.managed_from_object) {
            (Some(from_object), _) if !is_kept => {
                // SAFETY: The object is of the type that offers this function. The interpreter is attached.
                if unsafe { from_object(pointer, &raw mut array.tensor) } != 0 {
                    return Err(refused(py, name));
                }
            }
            (_, Some(from_object)) => {
                let mut managed = null_mut();
                // SAFETY: As above.
                let code = unsafe { from_object(pointer, &raw mut managed) };
                let Some(managed) = NonNull::new(managed).filter(|_| code == 0) else {
                    return Err(refused(py, name));
                };
                array.owner = Owner::Managed(managed);
                // SAFETY: The producer returned an initialised tensor, of the version that `exchange_api` checked.
                let managed = unsafe { managed.as_ref() };
                array.tensor = managed.tensor;
                array.is_read_only = managed.flags & abi::READ_ONLY != 0;
            }
            _ => return Self::by_capsule(name, object, array.library, place),
        }
        Ok(array)
    }

    fn by_capsule(
        name: &'static str,
        object: &'a Bound<'py, PyAny>,
        library: Arc<Library>,
        place: Place,
    ) -> PyResult<Self> {
        let py = object.py();
        let method = object.getattr(intern!(py, "__dlpack__")).map_err(|failure| {
            if failure.is_instance_of::<PyAttributeError>(py) {
                let found = object.get_type();
                error(
                    py,
                    Kind::ArgumentType,
                    format!("{name} is {found}, expected an array with __dlpack__, such as numpy's or torch's"),
                )
            } else {
                failure
            }
        })?;
        let stream = place.stream_argument(object);
        let of_stream = |arguments: &Bound<'py, PyDict>| match stream {
            Some(stream) => place::with_stream(arguments, stream),
            None => Ok(arguments.clone()),
        };
        let capsule = match method.call((), Some(&of_stream(max_version(py)?)?)) {
            Err(failure) if failure.is_instance_of::<PyTypeError>(py) => {
                method.call((), Some(&of_stream(&PyDict::new(py))?))
            }
            other => other,
        };
        let capsule = capsule.map_err(|failure| cannot_export(py, name, failure))?;
        let Ok(capsule) = capsule.cast::<PyCapsule>() else {
            let text =
                format!("{name}.__dlpack__() returned {}, expected a capsule", capsule.get_type());
            return Err(error(py, Kind::ArgumentType, text));
        };
        let pointer = |name: &CStr| capsule.pointer_checked(Some(name)).ok();
        let (tensor, is_read_only) = if let Some(managed) = pointer(VERSIONED) {
            // SAFETY: A capsule of this name holds such a structure; its version comes first in every version.
            let version = unsafe { managed.cast::<abi::Version>().read() };
            if version.major != abi::MAJOR {
                let text = format!(
                    "{name} comes with DLPack {}.{}, expected version {}",
                    version.major,
                    version.minor,
                    abi::MAJOR
                );
                return Err(error(py, Kind::Argument, text));
            }
            // SAFETY: The version is checked.
            let managed = unsafe { managed.cast::<VersionedTensor>().as_ref() };
            (managed.tensor, managed.flags & abi::READ_ONLY != 0)
        } else if let Some(managed) = pointer(LEGACY) {
            // SAFETY: A capsule of this name holds such a structure.
            (unsafe { managed.cast::<abi::ManagedTensor>().as_ref() }.tensor, false)
        } else {
            let text =
                format!("{name}.__dlpack__() returned a capsule of another kind than DLPack's");
            return Err(error(py, Kind::ArgumentType, text));
        };
        let owner = Owner::Capsule { _capsule: capsule.clone().into_any().unbind() };
        Ok(Self { object, tensor, is_read_only, library, owner, other_stream: None })
    }

    /// Checks the array against `expected`.
    pub fn matrix(&self, expected: &Expected<'_>) -> PyResult<Matrix> {
        let py = self.object.py();
        let tensor = &self.tensor;
        let wrong = |kind| {
            let found = Description(tensor);
            error(py, kind, format!("{} is {found}, expected {expected}", expected.name))
        };
        if !expected.place.holds(tensor.device) {
            let advice = expected.place.advice(tensor.device);
            let text = format!(
                "{} is {}, expected {expected}{advice}",
                expected.name,
                Description(tensor)
            );
            return Err(error(py, Kind::Argument, text));
        }
        let element = expected.elements.iter().find(|element| element.data_type() == tensor.dtype);
        let Some(&element) = element else { return Err(wrong(Kind::ArgumentType)) };
        let &[rows, cols] = self.shape() else { return Err(wrong(Kind::Argument)) };
        let (Ok(rows), Ok(cols)) = (usize::try_from(rows), usize::try_from(cols)) else {
            return Err(wrong(Kind::Argument));
        };
        let is_wrong =
            |found: usize, wanted: Option<usize>| wanted.is_some_and(|wanted| wanted != found);
        if is_wrong(rows, expected.rows) || is_wrong(cols, expected.cols) {
            return Err(wrong(Kind::Argument));
        }
        if rows.checked_mul(cols).is_none_or(|len| len > isize::MAX as usize / element.bytes()) {
            return Err(wrong(Kind::Argument));
        }
        if rows * cols > 0
            && let Some(&[row_stride, col_stride]) = self.strides()
            && ((cols > 1 && col_stride != 1) || (rows > 1 && row_stride != cols as i64))
        {
            return Err(wrong(Kind::Argument));
        }
        let data = if rows * cols == 0 {
            // Producers may leave the pointer of an empty tensor null.
            NonNull::<u64>::dangling().cast()
        } else {
            let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
            match NonNull::new(data)
                .filter(|data| (data.as_ptr() as usize).is_multiple_of(element.bytes()))
            {
                Some(data) => data,
                None => {
                    let text = format!(
                        "{} lies at address {data:p}, expected a multiple of {} bytes",
                        expected.name,
                        element.bytes()
                    );
                    return Err(error(py, Kind::Argument, text));
                }
            }
        };
        Ok(Matrix { data, rows, cols, element })
    }

    /// As [`matrix`](Self::matrix), for an array that will be written.
    pub fn matrix_mut(&self, expected: &Expected<'_>) -> PyResult<Matrix> {
        let matrix = self.matrix(expected)?;
        if self.is_read_only {
            let text =
                format!("{} is read-only, expected an array that can be written", expected.name);
            return Err(error(self.object.py(), Kind::Argument, text));
        }
        Ok(matrix)
    }

    /// Makes an array of the same library, type and shape, with unspecified values. `None` for a library
    /// whose arrays cannot be written.
    pub fn empty_like(&self) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = self.object.py();
        if let Some(api) = self.library.api
            && let (Some(allocate), Some(to_object)) = (api.allocate, api.object_from_managed)
        {
            let mut managed = null_mut();
            // SAFETY: The prototype is valid, and the context is not used.
            let code = unsafe {
                allocate(&raw const self.tensor, &raw mut managed, null_mut(), set_error)
            };
            let mut object = null_mut();
            // SAFETY: `allocate` returned a tensor, which `to_object` takes.
            if code != 0 || unsafe { to_object(managed, &raw mut object) } != 0 {
                return Err(PyErr::fetch(py));
            }
            // SAFETY: `to_object` returned a new reference.
            return Ok(Some(unsafe { Bound::from_owned_ptr(py, object.cast()) }));
        }
        let empty_like = self.library.empty_like.as_ref();
        empty_like.map(|empty_like| empty_like.bind(py).call1((self.object,))).transpose()
    }

    /// The Python object.
    pub fn object(&self) -> &'a Bound<'py, PyAny> {
        self.object
    }

    /// The interpreter's token.
    pub fn py(&self) -> Python<'py> {
        self.object.py()
    }

    /// Stream of the array's work, if that is another one than the call's. Valid for a live array only.
    pub fn other_stream(&self) -> Option<u64> {
        self.other_stream
    }

    /// The owner of the memory.
    pub fn into_owner(self) -> Owner {
        self.owner
    }

    fn shape(&self) -> &[i64] {
        numbers(&self.tensor, self.tensor.shape).unwrap_or_default()
    }

    fn strides(&self) -> Option<&[i64; 2]> {
        numbers(&self.tensor, self.tensor.strides)?.try_into().ok()
    }
}

/// `ndim` numbers at `pointer`, unless it is null.
fn numbers(tensor: &abi::Tensor, pointer: *const i64) -> Option<&[i64]> {
    let len = usize::try_from(tensor.ndim).ok().filter(|&len| len <= MAX_DIMS)?;
    // SAFETY: The producer keeps `ndim` numbers there as long as the tensor lives.
    (!pointer.is_null()).then(|| unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// The arguments by name of `__dlpack__`.
fn max_version(py: Python<'_>) -> PyResult<&Bound<'_, PyDict>> {
    static ARGUMENTS: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let arguments = ARGUMENTS.get_or_try_init(py, || {
        let arguments = PyDict::new(py);
        arguments.set_item("max_version", (abi::MAJOR, 1))?;
        PyResult::Ok(arguments.unbind())
    })?;
    Ok(arguments.bind(py))
}

/// The library could not describe the array: its own exception is the cause.
fn refused(py: Python<'_>, name: &str) -> PyErr {
    cannot_export(py, name, PyErr::fetch(py))
}

fn cannot_export(py: Python<'_>, name: &str, cause: PyErr) -> PyErr {
    let failure = error(
        py,
        Kind::Argument,
        format!("{name} cannot be read through DLPack: {}", first_line(cause.value(py))),
    );
    failure.set_cause(py, Some(cause));
    failure
}

/// The first line of an exception's text: torch adds its stack.
fn first_line(exception: &Bound<'_, pyo3::exceptions::PyBaseException>) -> String {
    exception.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Takes the error of a failed allocation.
unsafe extern "C" fn set_error(
    _context: *mut c_void,
    _kind: *const c_char,
    message: *const c_char,
) {
    Python::attach(|py| {
        let message = if message.is_null() {
            "no reason given".into()
        } else {
            // SAFETY: The producer passes a text that ends in a zero.
            unsafe { CStr::from_ptr(message) }.to_string_lossy()
        };
        error(py, Kind::Error, format!("cannot make an array for the result: {message}"))
            .restore(py);
    });
}

const EMPTY: abi::Tensor = abi::Tensor {
    data: null_mut(),
    device: abi::Device { kind: 0, id: 0 },
    ndim: 0,
    dtype: abi::DataType { code: 0, bits: 0, lanes: 0 },
    shape: null_mut(),
    strides: null_mut(),
    byte_offset: 0,
};
const VERSIONED: &CStr = c"dltensor_versioned";
const LEGACY: &CStr = c"dltensor";
const MAX_DIMS: usize = 64;
