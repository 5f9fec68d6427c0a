//! Questions to the CUDA driver, which is opened at run time.

use cudarc::driver::DriverError;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUGPUDirectRDMAWritesOrdering, CUdevice_attribute};

use super::{CudaState, Gpu, GpuReport, NicAccess};

/// Replaces the kernel driver's report by the CUDA driver's, where that works.
pub(crate) fn complete(mut report: GpuReport) -> GpuReport {
    // Checked first, because every other call panics when the library is missing. SAFETY: opens and closes the
    // library, whose constructors have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        report.cuda = CudaState::NoLibrary;
        return report;
    }
    match ask() {
        Ok((version, gpus)) => {
            report.cuda = CudaState::Ready { version };
            report.gpus = gpus;
        }
        Err((call, error)) => {
            report.cuda = CudaState::Failed { call, error: format!("{:?}", error.0) };
        }
    }
    report
}

type Failure = (&'static str, DriverError);

fn ask() -> Result<((u32, u32), Vec<Gpu>), Failure> {
    result::init().map_err(|error| ("cuInit", error))?;
    let mut version = 0;
    // SAFETY: writes one int, which is there.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    asked.result().map_err(|error| ("cuDriverGetVersion", error))?;
    let version = u32::try_from(version).unwrap_or(0);
    let count = result::device::get_count().map_err(|error| ("cuDeviceGetCount", error))?;
    let gpus = (0..count).map(gpu).collect::<Result<_, _>>()?;
    // 13020 means 13.2.
    Ok(((version / 1000, version % 1000 / 10), gpus))
}

fn gpu(ordinal: i32) -> Result<Gpu, Failure> {
    let device = result::device::get(ordinal).map_err(|error| ("cuDeviceGet", error))?;
    let name = result::device::get_name(device).map_err(|error| ("cuDeviceGetName", error))?;
    // SAFETY: `device` came from the driver just now; devices are never destroyed.
    let memory = unsafe { result::device::total_mem(device) };
    let memory = memory.map_err(|error| ("cuDeviceTotalMem", error))?;
    let attribute = |which| {
        // SAFETY: as above.
        let value = unsafe { result::device::get_attribute(device, which) };
        value
            .map(|value| u32::try_from(value).unwrap_or(0))
            .map_err(|error| ("cuDeviceGetAttribute", error))
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let by_address = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED;
    let by_dma_buf = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
    let order = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
    let owner = CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
    // A driver that is older than a query lacks the queried feature.
    let nic_access = NicAccess {
        by_address: attribute(by_address).unwrap_or(0) != 0,
        by_dma_buf: attribute(by_dma_buf).unwrap_or(0) != 0,
        orders_writes: attribute(order).unwrap_or(0) >= owner as u32,
    };
    Ok(Gpu {
        name,
        memory_bytes: Some(memory as u64),
        compute_capability: Some((major, minor)),
        nic_access: Some(nic_access),
    })
}
