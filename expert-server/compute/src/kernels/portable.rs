//! Plain Rust, in a form that compilers vectorise.

use checkpoint::FP4_VALUES;

use super::simd::{Bf16, F8, F16, F32, Fp4, Int4, Int8, Simd};
use super::tile::{self, Blocks, Format, Groups, Irregular, Stored};
use super::{FormatKernels, Formats, Isa, Kernels, MAX_TOKENS};

pub(super) const KERNELS: Kernels = Kernels {
    isa: Isa::Portable,
    pass_tokens: 4,
    formats: Formats {
        bf16: kernels::<Stored<Bf16>>(),
        f16: kernels::<Stored<F16>>(),
        f32: kernels::<Stored<F32>>(),
        f8_blocks: kernels::<Blocks>(),
        f8: kernels::<Groups<F8>>(),
        int8: kernels::<Groups<Int8>>(),
        int4: kernels::<Groups<Int4>>(),
        fp4: kernels::<Groups<Fp4>>(),
        irregular: kernels::<Irregular>(),
    },
    activate: tile::activate,
    axpy: tile::axpy::<Portable>,
    read: tile::read::<Portable>,
};

const fn kernels<F: Format>() -> FormatKernels {
    FormatKernels {
        max_tokens: F::MAX_TOKENS,
        dot: tile::dot::<Portable, F>,
        widen: F::widen::<Portable>,
    }
}

#[derive(Clone, Copy)]
struct Portable;

const LANES: usize = 8;
type V = [f32; LANES];

// SAFETY: uses no instruction set beyond the target's baseline.
unsafe impl Simd for Portable {
    type V = V;
    const LANES: usize = LANES;
    const ROWS: [usize; MAX_TOKENS + 1] = [0, 1, 2, 2, 2, 1, 1];
    const SCALED_ROWS: [usize; MAX_TOKENS + 1] = [0, 1, 2, 2, 2, 1, 1];

    #[inline(always)]
    unsafe fn splat(value: f32) -> V {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn mul_add(a: V, b: V, c: V) -> V {
        // Not `f32::mul_add`, which is a library call on processors without FMA.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn sum4(v: [V; 4]) -> [f32; 4] {
        v.map(|v| ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])))
    }

    #[inline(always)]
    unsafe fn store(v: V, dst: *mut f32) {
        // SAFETY: the caller promises room for `LANES` values.
        unsafe { dst.cast::<V>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn prefetch(_src: *const u8) {}

    #[inline(always)]
    unsafe fn load_f32(src: *const u8) -> V {
        // SAFETY: the caller promises `LANES` values; any bits are an f32.
        let bits = unsafe { src.cast::<[u32; LANES]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from_le(bits)))
    }

    #[inline(always)]
    unsafe fn load_bf16(src: *const u8) -> V {
        // SAFETY: the caller promises `LANES` values.
        let bits = unsafe { src.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(u16::from_le(bits)) << 16))
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8) -> V {
        // SAFETY: the caller promises `LANES` values.
        let bits = unsafe { src.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f16_to_f32(u16::from_le(bits)))
    }

    #[inline(always)]
    unsafe fn load_f8(src: *const u8) -> V {
        // SAFETY: the caller promises `LANES` values.
        let bytes = unsafe { src.cast::<[u8; LANES]>().read_unaligned() };
        bytes.map(|byte| f16_to_f32(u16::from(byte & 0x80) << 8 | u16::from(byte & 0x7f) << 7))
    }

    #[inline(always)]
    unsafe fn load_f8_pair(src: *const u8) -> [V; 2] {
        // SAFETY: the caller promises twice `LANES` values.
        unsafe { [Self::load_f8(src), Self::load_f8(src.add(LANES))] }
    }

    #[inline(always)]
    unsafe fn load_i8(src: *const u8) -> V {
        // SAFETY: the caller promises `LANES` values.
        let bytes = unsafe { src.cast::<[i8; LANES]>().read_unaligned() };
        bytes.map(f32::from)
    }

    /// Scale and minimum.
    type Int4 = [f32; 2];

    #[inline(always)]
    unsafe fn int4(scale: f32, minimum: f32) -> [f32; 2] {
        [scale, minimum]
    }

    #[inline(always)]
    unsafe fn load_int4([scale, minimum]: [f32; 2], src: *const u8) -> V {
        // SAFETY: the caller promises `LANES` values.
        unsafe { codes(src) }.map(|code| (f32::from(code) - 8.0) * scale + minimum)
    }

    /// The scale.
    type Fp4 = f32;

    #[inline(always)]
    unsafe fn fp4(scale: f32) -> f32 {
        scale
    }

    #[inline(always)]
    unsafe fn load_fp4(scale: f32, src: *const u8) -> V {
        // SAFETY: the caller promises `LANES` values.
        unsafe { codes(src) }.map(|code| FP4_VALUES[usize::from(code)] * scale)
    }
}

/// Packed 4-bit codes.
///
/// # Safety
/// `src` is valid for `LANES / 2` bytes.
#[inline(always)]
unsafe fn codes(src: *const u8) -> [u8; LANES] {
    // SAFETY: as promised by the caller.
    let bytes = unsafe { src.cast::<[u8; LANES / 2]>().read_unaligned() };
    std::array::from_fn(|i| bytes[i / 2] >> (i % 2 * 4) & 15)
}

/// Widens by a shift of the bits and a multiplication that corrects the exponent. That is exact for
/// subnormals, too, and has no branch.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    let value = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let value =
        if magnitude >= 0x7c00 { f32::from_bits(magnitude << 13 | 0x7f80_0000) } else { value };
    f32::from_bits(value.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            let same = found.to_bits() == expected.to_bits();
            assert!(same || (found.is_nan() && expected.is_nan()), "{bits:#06x}");
        }
    }
}
