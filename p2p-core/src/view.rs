//! Windows over memory that is shared with a peer.
//!
//! A peer can change its slot at any moment, also while it is being read. So no `&[u8]` is ever
//! formed over it. A view returns copies, one bounds-checked access at a time. Code then checks the
//! copy, and uses only the copy.

use std::marker::PhantomData;
use std::ptr::NonNull;

use thiserror::Error;

use crate::copy::copy_out;

/// An access beyond the end of a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("access of {len} bytes at offset {offset} leaves the view of {view_bytes} bytes")]
pub struct OutOfRange {
    /// First byte of the access.
    pub offset: usize,
    /// Bytes of the access.
    pub len: usize,
    /// Bytes of the view.
    pub view_bytes: usize,
}

/// Readable window over memory that a peer may write at any time.
#[derive(Debug, Clone, Copy)]
pub struct ReadView<'a> {
    ptr: NonNull<u8>,
    len: usize,
    _memory: PhantomData<&'a u8>,
}

// SAFETY: a view is a pointer and a length. Every access copies, and the memory behind it outlives
// 'a wherever the view is used.
unsafe impl Send for ReadView<'_> {}

impl<'a> ReadView<'a> {
    /// Window over `len` bytes from `ptr`.
    ///
    /// # Safety
    /// The bytes must stay mapped and readable for `'a`. Others may write them.
    #[must_use]
    pub const unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len, _memory: PhantomData }
    }

    /// Bytes in the window.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the window is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Start of the window, for code that reads it by raw copies (vector kernels, DMA).
    #[must_use]
    pub const fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// The part of the window that starts at `offset` and has `len` bytes.
    ///
    /// # Errors
    /// [`OutOfRange`] when the part leaves the window.
    pub fn sub(&self, offset: usize, len: usize) -> Result<ReadView<'a>, OutOfRange> {
        check(offset, len, self.len)?;
        // SAFETY: offset + len <= self.len, so the part is inside memory that outlives 'a.
        Ok(unsafe { ReadView::new(self.ptr.add(offset), len) })
    }

    /// Copies `out.len()` bytes from `offset` into `out`.
    ///
    /// # Errors
    /// [`OutOfRange`] when the range leaves the window; `out` is then untouched.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfRange> {
        check(offset, out.len(), self.len)?;
        // SAFETY: the source range was checked, `out` is an exclusive local buffer, and a slot never
        // overlaps one. A peer that writes meanwhile can only make the copied bytes arbitrary.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.ptr.as_ptr().add(offset),
                out.as_mut_ptr(),
                out.len(),
            );
        }
        Ok(())
    }
}

/// Writable window over memory that a peer reads.
#[derive(Debug)]
pub struct WriteView<'a> {
    ptr: NonNull<u8>,
    len: usize,
    _memory: PhantomData<&'a mut u8>,
}

// SAFETY: as for `ReadView`; writes are raw copies, and the holder has the only WriteView.
unsafe impl Send for WriteView<'_> {}

impl WriteView<'_> {
    /// Window over `len` bytes from `ptr`.
    ///
    /// # Safety
    /// The bytes must stay mapped and writable for the view's life, and nothing else in this process
    /// may write them meanwhile.
    #[must_use]
    pub const unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len, _memory: PhantomData }
    }

    /// Bytes in the window.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the window is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Start of the window, for code that writes it by raw stores (vector kernels, DMA).
    #[must_use]
    pub const fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`OutOfRange`] when the range leaves the window; nothing is written then.
    pub fn put_bytes(&mut self, offset: usize, bytes: &[u8]) -> Result<(), OutOfRange> {
        check(offset, bytes.len(), self.len)?;
        // SAFETY: the destination range was checked and never overlaps a local buffer.
        unsafe { copy_out(bytes.as_ptr(), self.ptr.as_ptr().add(offset), bytes.len()) };
        Ok(())
    }
}

fn check(offset: usize, len: usize, view_bytes: usize) -> Result<(), OutOfRange> {
    match offset.checked_add(len) {
        Some(end) if end <= view_bytes => Ok(()),
        _ => Err(OutOfRange { offset, len, view_bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_beyond_the_end_are_refused_and_change_nothing() {
        let mut memory = [7u8; 16];
        let ptr = NonNull::new(memory.as_mut_ptr()).expect("array");
        // SAFETY: `memory` outlives both views and is touched only through them here.
        let (read, mut write) = unsafe { (ReadView::new(ptr, 16), WriteView::new(ptr, 16)) };
        let mut out = [1u8; 4];
        assert!(read.copy_to(13, &mut out).is_err());
        assert_eq!(out, [1; 4]);
        assert!(read.copy_to(usize::MAX, &mut out).is_err());
        assert!(write.put_bytes(14, &[0; 3]).is_err());
        assert!(read.sub(8, 9).is_err());
        write.put_bytes(12, &[1, 2, 3, 4]).expect("in range");
        read.sub(8, 8).expect("in range").copy_to(4, &mut out).expect("in range");
        assert_eq!(out, [1, 2, 3, 4]);
    }
}
