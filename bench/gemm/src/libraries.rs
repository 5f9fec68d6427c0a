//! The libraries, each as one function: `y [num_tokens, num_rows] = x [num_tokens, len] * w^T`.

use expert_compute::Products;
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};

pub struct Library {
    pub name: &'static str,
    pub products: Products,
}

pub const LIBRARIES: [Library; 3] = [
    Library { name: "gemm", products: expert_compute::gemm },
    Library { name: "matrixmultiply", products: by_matrixmultiply },
    Library { name: "faer", products: by_faer },
];

/// Checks that all sizes fit. Returns the numbers of rows of `w` and of `x`.
fn sizes(w: &[f32], x: &[f32], len: usize, y: &[f32]) -> (usize, usize) {
    let (num_rows, num_tokens) = (w.len() / len, x.len() / len);
    assert_eq!((w.len(), x.len()), (num_rows * len, num_tokens * len));
    assert_eq!(y.len(), num_tokens * num_rows);
    (num_rows, num_tokens)
}

fn by_matrixmultiply(w: &[f32], x: &[f32], len: usize, y: &mut [f32]) {
    let (num_rows, num_tokens) = sizes(w, x, len, y);
    let (len_stride, row_stride) = (len as isize, num_rows as isize);
    // SAFETY: the matrices have the sizes just checked; `y` aliases nothing.
    unsafe {
        matrixmultiply::sgemm(
            num_tokens,
            len,
            num_rows,
            1.0,
            x.as_ptr(),
            len_stride,
            1,
            w.as_ptr(),
            1,
            len_stride,
            0.0,
            y.as_mut_ptr(),
            row_stride,
            1,
        );
    }
}

/// As `y^T = w * x^T`, whose destination is column-major without gaps.
fn by_faer(w: &[f32], x: &[f32], len: usize, y: &mut [f32]) {
    let (num_rows, num_tokens) = sizes(w, x, len, y);
    matmul(
        MatMut::from_column_major_slice_mut(y, num_rows, num_tokens),
        Accum::Replace,
        MatRef::from_row_major_slice(w, num_rows, len),
        MatRef::from_column_major_slice(x, len, num_tokens),
        1.0f32,
        Par::Seq,
    );
}
