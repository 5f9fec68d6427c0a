//! The tensors of a call, checked.

use attention_client::ClientModel;
use pyo3::intern;
use pyo3::prelude::*;

use crate::dlpack::{Array, ElementType, Expected, Matrix, Owner, Place};
use crate::errors::{Kind, error};

/// Number of a layer.
pub fn layer(layer: &Bound<'_, PyAny>) -> PyResult<u32> {
    let py = layer.py();
    let Ok(number) = layer.extract::<i64>() else {
        let text = format!("layer is {}, expected the number of a MoE layer", layer.get_type());
        return Err(error(py, Kind::ArgumentType, text));
    };
    u32::try_from(number).map_err(|_| {
        let text = format!("layer is {number}, expected the number of a MoE layer, 0 or more");
        error(py, Kind::Argument, text)
    })
}

/// The arrays that a call reads.
pub struct Request<'a, 'py> {
    x: Array<'a, 'py>,
    raw: RawRequest,
    place: Place,
    topk_idx: Array<'a, 'py>,
    topk_weights: Array<'a, 'py>,
}

/// The matrices of a [`Request`], for a thread without the interpreter.
#[derive(Debug, Clone, Copy)]
pub struct RawRequest {
    pub x: Matrix,
    pub topk_idx: Matrix,
    pub topk_weights: Matrix,
}

/// The matrix that a call writes, for a thread without the interpreter.
#[derive(Debug, Clone, Copy)]
pub struct RawTarget {
    pub out: Matrix,
}

impl<'a, 'py> Request<'a, 'py> {
    /// Checks the arguments against each other and against the model. With `is_kept` the memory stays valid while
    /// [`into_owners`](Self::into_owners) live; that of `x` only on the host.
    pub fn new(
        model: &ClientModel,
        place: Place,
        x: &'a Bound<'py, PyAny>,
        topk_idx: &'a Bound<'py, PyAny>,
        topk_weights: &'a Bound<'py, PyAny>,
        is_kept: bool,
    ) -> PyResult<Self> {
        // On the host a dispatch reads the others at once.
        let others_are_kept = is_kept && place != Place::Host;
        let x_array = Array::of("x", x, is_kept, place)?;
        let x_matrix = x_array.matrix(&Expected {
            name: "x",
            rows: None,
            cols: Some(model.shape.hidden as usize),
            elements: FLOATS,
            cols_name: "hidden",
            place,
        })?;
        let idx_array = Array::of("topk_idx", topk_idx, others_are_kept, place)?;
        let idx_matrix = idx_array.matrix(&Expected {
            name: "topk_idx",
            rows: Some(x_matrix.rows),
            cols: None,
            elements: &[ElementType::I32, ElementType::I64],
            cols_name: "k",
            place,
        })?;
        let top_k = model.shape.top_k as usize;
        if idx_matrix.cols > top_k {
            let text = format!(
                "topk_idx has {} columns, expected at most {top_k}, the top-k of the model",
                idx_matrix.cols
            );
            return Err(error(x.py(), Kind::Argument, text));
        }
        let weights_array = Array::of("topk_weights", topk_weights, others_are_kept, place)?;
        let weights_matrix = weights_array.matrix(&Expected {
            name: "topk_weights",
            rows: Some(x_matrix.rows),
            cols: Some(idx_matrix.cols),
            elements: FLOATS,
            cols_name: "k",
            place,
        })?;
        let raw = RawRequest { x: x_matrix, topk_idx: idx_matrix, topk_weights: weights_matrix };
        Ok(Self { x: x_array, raw, place, topk_idx: idx_array, topk_weights: weights_array })
    }

    /// Streams of the arrays' work that the call's stream must wait for.
    pub fn other_streams(&self) -> impl Iterator<Item = u64> {
        [&self.x, &self.topk_idx, &self.topk_weights].into_iter().filter_map(Array::other_stream)
    }

    pub fn raw(&self) -> RawRequest {
        self.raw
    }

    /// The arrays as objects.
    pub fn objects(&self) -> impl Iterator<Item = &Bound<'py, PyAny>> {
        [&self.x, &self.topk_idx, &self.topk_weights].into_iter().map(Array::object)
    }

    /// The owners of the memory of `x`, and of that of indices and weights.
    pub fn into_owners(self) -> (Owner, [Owner; 2]) {
        (self.x.into_owner(), [self.topk_idx.into_owner(), self.topk_weights.into_owner()])
    }
}

/// The array that a call writes.
pub struct Target<'py> {
    object: Bound<'py, PyAny>,
    /// The library that makes the result of `object`.
    namespace: Option<Bound<'py, PyAny>>,
    raw: RawTarget,
    other_stream: Option<u64>,
    owner: Owner,
}

impl<'py> Target<'py> {
    /// Checks `out`, or makes an array like `x`.
    pub fn new(
        request: &Request<'_, 'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        let RawRequest { x: x_matrix, topk_idx, topk_weights } = request.raw;
        let target = match out {
            Some(out) => Self::of(x_matrix, request.place, out, false)?,
            None => return Self::like(x_matrix, request.place, &request.x, false),
        };
        for (name, input) in
            [("x", x_matrix), ("topk_idx", topk_idx), ("topk_weights", topk_weights)]
        {
            if target.raw.out.overlaps(&input) {
                let text = format!("out shares memory with {name}, expected an array of its own");
                return Err(error(x.py(), Kind::Argument, text));
            }
        }
        Ok(target)
    }

    /// Checks `out` against the shape and type of `x`. With `is_kept` its memory stays valid while the owner of
    /// [`into_parts`](Self::into_parts) lives.
    pub fn of(x: Matrix, place: Place, out: &Bound<'py, PyAny>, is_kept: bool) -> PyResult<Self> {
        let array = Array::of("out", out, is_kept, place)?;
        let out_matrix = array.matrix_mut(&Expected {
            name: "out",
            rows: Some(x.rows),
            cols: Some(x.cols),
            elements: &[x.element],
            cols_name: "hidden",
            place,
        })?;
        Ok(Self {
            object: out.clone(),
            namespace: None,
            raw: RawTarget { out: out_matrix },
            other_stream: array.other_stream(),
            owner: array.into_owner(),
        })
    }

    /// Makes an array of the library, type and shape of `x`.
    pub fn like(matrix: Matrix, place: Place, x: &Array<'_, 'py>, is_kept: bool) -> PyResult<Self> {
        match (x.empty_like()?, place) {
            (Some(out), _) => Self::of(matrix, place, &out, is_kept),
            (None, Place::Host) => Self::to_convert(matrix, x),
            (None, Place::Gpu { .. }) => {
                let class = x.object().get_type();
                let text = format!("no array like x can be made on {place}, a {class}: pass out");
                Err(error(x.py(), Kind::Argument, text))
            }
        }
    }

    /// Makes an array of numpy for an `x` whose library makes arrays only of given values.
    fn to_convert(matrix: Matrix, x: &Array<'_, 'py>) -> PyResult<Self> {
        let py = x.py();
        let namespace = x.object().getattr(intern!(py, "__array_namespace__"));
        let dtype = match matrix.element {
            ElementType::F16 => "float16",
            _ => "float32",
        };
        let (Ok(namespace), true) = (namespace, matrix.element != ElementType::Bf16) else {
            let class = x.object().get_type();
            let text =
                format!("no array like x can be made, a {class} of {}: pass out", matrix.element);
            return Err(error(py, Kind::Argument, text));
        };
        let out = py.import("numpy")?.call_method1("empty", ((matrix.rows, matrix.cols), dtype))?;
        Ok(Self {
            namespace: Some(namespace.call0()?),
            ..Self::of(matrix, Place::Host, &out, false)?
        })
    }

    pub fn raw(&self) -> RawTarget {
        self.raw
    }

    /// The stream of the array's work, if the call's stream must wait for it.
    pub fn other_stream(&self) -> Option<u64> {
        self.other_stream
    }

    /// The array as an object.
    pub fn object(&self) -> &Bound<'py, PyAny> {
        &self.object
    }

    /// The array that a call on a GPU writes, and the owner of its memory.
    pub fn into_parts(self) -> (Py<PyAny>, Owner) {
        (self.object.unbind(), self.owner)
    }

    /// The array that was written.
    pub fn into_object(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.namespace {
            Some(namespace) => namespace.call_method1(intern!(py, "from_dlpack"), (self.object,)),
            None => Ok(self.object),
        }
    }
}

const FLOATS: &[ElementType] = &[ElementType::F32, ElementType::Bf16, ElementType::F16];
