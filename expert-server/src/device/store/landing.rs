//! Experts that arrive in pieces, in the page-locked buffers of an uploader.

use std::ptr::NonNull;

use checkpoint::DType;

use super::reservation::Reservation;
use super::shape::BLOCK_FP8;
use super::weights::{has_nan, is_nan, le_bytes};
use super::*;
use crate::compute::{WeightError, WeightScales};

/// The place of an expert that arrives in pieces.
pub(super) struct DeviceLanding<'a> {
    reservation: Reservation<'a>,
    expert: (u32, u32),
    /// Targets of the expert's parts, in the order in which servers exchange them.
    targets: Vec<Target>,
}

/// The destination of a part.
enum Target {
    Codes {
        to: DevicePtr,
        size: [usize; 2],
        is_fp8: bool,
    },
    /// Scales are converted to f32 when all are there.
    Scales {
        to: DevicePtr,
        dtype: DType,
        factor: f32,
        bytes: Vec<u8>,
        expected: usize,
    },
    /// A part that is empty for these formats.
    Nothing,
}

impl<'a> DeviceLanding<'a> {
    /// [`Room::Whole`] if the GPU does not hold experts of these forms as they are.
    pub(super) fn open(
        store: &'a DeviceStore,
        layer: u32,
        expert: u32,
        forms: &[MatrixForm],
    ) -> Result<Room<'a>, LoadError> {
        if forms.len() != 3 || forms.iter().any(|form| form.format != store.format()) {
            return Ok(Room::Whole);
        }
        let Some(mut reservation) = store.reserve(layer, expert)? else {
            return Ok(Room::Loaded);
        };
        let (_, memory, local_idx) = reservation.parts();
        let WeightShape { hidden, inter, is_fp8 } = store.shape;
        let (inputs, outputs) = ([inter, hidden], [hidden, inter]);
        let mut targets = Vec::new();
        for (form, (parts, idx, size)) in forms.iter().zip([
            ([Part::GateUp, Part::GateUpScales], 0, inputs),
            ([Part::GateUp, Part::GateUpScales], 1, inputs),
            ([Part::Down, Part::DownScales], 0, outputs),
        ]) {
            let [codes, scales] = parts.map(|part| memory.at(part, local_idx));
            let to = codes.map_err(refused)?.add(idx * store.shape.matrix_bytes());
            targets.push(Target::Codes { to, size, is_fp8 });
            if let Some((dtype, factor)) = form.scales {
                let num_scales = store.shape.num_scales();
                let to = scales.map_err(refused)?.add(idx * num_scales * 4);
                let expected = num_scales as usize;
                targets.push(Target::Scales { to, dtype, factor, bytes: Vec::new(), expected });
                targets.push(Target::Nothing);
            }
        }
        Ok(Room::Pieces(Box::new(Self { reservation, expert: (layer, expert), targets })))
    }

    fn damaged(&self, source: WeightError) -> LoadError {
        let (layer, expert) = self.expert;
        LoadError::Weight { layer, expert, source }
    }
}

impl Landing for DeviceLanding<'_> {
    fn buffers(&mut self) -> Result<Vec<NonNull<[u8]>>, LoadError> {
        self.reservation.parts().0.buffers().map(Into::into).map_err(refused)
    }

    fn free_buffer(&mut self) -> Result<usize, LoadError> {
        self.reservation.parts().0.free_buffer().map_err(refused)
    }

    fn take(&mut self, part: usize, offset: usize, bytes: &[u8]) -> Result<(), LoadError> {
        match self.targets.get_mut(part) {
            Some(&mut Target::Codes { to, size: [rows, cols], is_fp8 }) => {
                if is_fp8 && has_nan(bytes) {
                    let at = bytes.iter().position(is_nan).unwrap_or(0);
                    let offset = offset + at;
                    return Err(self.damaged(WeightError::NotFinite { rows, cols, offset }));
                }
                let (uploader, ..) = self.reservation.parts();
                uploader.copy_buffer(to.add(offset as u64), bytes.len()).map_err(refused)
            }
            Some(Target::Scales { bytes: all, .. }) => {
                all.extend_from_slice(bytes);
                Ok(())
            }
            Some(Target::Nothing) | None => Ok(()),
        }
    }

    fn abandon(mut self: Box<Self>) {
        self.reservation.keep_buffers();
    }

    fn finish(mut self: Box<Self>) -> Result<u64, LoadError> {
        for target in std::mem::take(&mut self.targets) {
            let Target::Scales { to, dtype, factor, bytes, expected } = target else { continue };
            let minima = Arc::new([]);
            let values = WeightScales { dtype, factor, data: bytes.into(), minima }.to_f32();
            let (rows, cols, format) =
                (self.store_shape().hidden, self.store_shape().inter, BLOCK_FP8);
            if values.len() != expected {
                let (what, found) = ("scales", values.len());
                let error = WeightError::ScaleSize { rows, cols, format, what, expected, found };
                return Err(self.damaged(error));
            }
            if let Some(idx) = values.iter().position(|value| !value.is_finite()) {
                let value = values[idx].to_string();
                let error = WeightError::ScaleNotFinite { rows, cols, format, idx, value };
                return Err(self.damaged(error));
            }
            self.reservation.parts().0.copy_bytes(to, &le_bytes(&values)).map_err(refused)?;
        }
        self.reservation.publish()
    }
}

impl DeviceLanding<'_> {
    fn store_shape(&mut self) -> WeightShape {
        self.reservation.parts().1.layout().shape
    }
}
