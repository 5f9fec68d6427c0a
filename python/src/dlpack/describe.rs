//! Tensors in words, for error messages.

use std::fmt;

use super::{abi, numbers};

/// A tensor in words.
pub struct Description<'t>(pub &'t abi::Tensor);

impl fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(tensor) = self;
        let shape = numbers(tensor, tensor.shape).unwrap_or_default();
        write!(f, "{shape:?} of {}", DataTypeName(tensor.dtype))?;
        if let Some(strides) = numbers(tensor, tensor.strides) {
            let mut expected = 1;
            let mut is_contiguous = true;
            for (&length, &stride) in shape.iter().zip(strides).rev() {
                is_contiguous &= length <= 1 || stride == expected;
                expected *= length.max(1);
            }
            if !is_contiguous {
                write!(f, " with strides {strides:?}")?;
            }
        }
        let abi::Device { kind, id } = tensor.device;
        match kind {
            abi::CPU | abi::CUDA_HOST | abi::ROCM_HOST => f.write_str(" on cpu"),
            abi::CUDA => write!(f, " on cuda:{id}"),
            abi::CUDA_MANAGED => write!(f, " in managed memory of cuda:{id}"),
            abi::ROCM => write!(f, " on rocm:{id}"),
            other => write!(f, " on DLPack device {other}:{id}"),
        }
    }
}

/// An element type in words.
pub struct DataTypeName(pub abi::DataType);

impl fmt::Display for DataTypeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let abi::DataType { code, bits, lanes } = self.0;
        match code {
            abi::INT => write!(f, "int{bits}"),
            abi::UINT => write!(f, "uint{bits}"),
            abi::FLOAT => write!(f, "float{bits}"),
            abi::BFLOAT => write!(f, "bfloat{bits}"),
            abi::COMPLEX => write!(f, "complex{bits}"),
            abi::BOOL => f.write_str("bool"),
            other => write!(f, "DLPack type {other} of {bits} bits"),
        }?;
        if lanes > 1 { write!(f, "x{lanes}") } else { Ok(()) }
    }
}
