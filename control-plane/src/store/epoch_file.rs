//! Epochs reserved on a full disk: a file whose space is allocated while there is some.
//!
//! Layout of `reserved-epoch`: two records at offsets 0 and [`RECORD_SPACING`], each 16 bytes: the epoch and the
//! CRC-32C of its bytes, both u64 little-endian. A reservation overwrites the record with the lower epoch, so a
//! torn write leaves the other one. File systems that never overwrite in place may still refuse it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Highest reserved epoch, 0 if the file does not exist or has no valid record.
pub(super) fn read(path: &Path) -> io::Result<u64> {
    match File::open(path) {
        Ok(file) => Ok(records(&file)?.into_iter().max().unwrap_or(0)),
        Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(err) => Err(err),
    }
}

/// Allocates the space of the file, if that has not been done.
pub(super) fn allocate(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    if file.metadata()?.len() < FILE_BYTES as u64 {
        file.write_all_at(&[0; FILE_BYTES], 0)?;
        file.sync_all()?;
    }
    Ok(())
}

/// Reserves `epoch`. Needs the space that [`allocate`] took.
pub(super) fn write(path: &Path, epoch: u64) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let [first, second] = records(&file)?;
    let offset = if first <= second { 0 } else { RECORD_SPACING };
    let mut record = [0; RECORD_BYTES];
    record[..8].copy_from_slice(&epoch.to_le_bytes());
    record[8..].copy_from_slice(&checksum(epoch).to_le_bytes());
    file.write_all_at(&record, offset)?;
    file.sync_data()
}

/// The epochs of both records; 0 for a record that is not valid.
fn records(file: &File) -> io::Result<[u64; 2]> {
    let mut epochs = [0; 2];
    for (epoch, offset) in epochs.iter_mut().zip([0, RECORD_SPACING]) {
        let mut record = [0; RECORD_BYTES];
        match file.read_exact_at(&mut record, offset) {
            Ok(()) => {}
            Err(err) if err.kind() == io::ErrorKind::UnexpectedEof => continue,
            Err(err) => return Err(err),
        }
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&record[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        if word(8) == checksum(word(0)) {
            *epoch = word(0);
        }
    }
    Ok(epochs)
}

fn checksum(epoch: u64) -> u64 {
    u64::from(crc32c::crc32c(&epoch.to_le_bytes()))
}

const RECORD_BYTES: usize = 16;
/// The records lie in different sectors, so that one torn sector cannot damage both.
const RECORD_SPACING: u64 = 4096;
const FILE_BYTES: usize = 2 * 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_valid_record_counts_and_damage_leaves_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("reserved-epoch");
        assert_eq!(read(&path).unwrap(), 0);
        assert!(write(&path, 5).is_err(), "the space is not allocated");
        allocate(&path).unwrap();
        assert_eq!(read(&path).unwrap(), 0);
        let mut last = 0;
        for epoch in [1, 2000, 2001, u64::MAX] {
            write(&path, epoch).unwrap();
            allocate(&path).unwrap();
            assert_eq!(read(&path).unwrap(), epoch);
            let good = std::fs::read(&path).unwrap();
            for at in (0..16).chain(4096..4112) {
                let mut bad = good.clone();
                bad[at] ^= 0x40;
                std::fs::write(&path, &bad).unwrap();
                assert!([epoch, last].contains(&read(&path).unwrap()), "byte {at}");
            }
            std::fs::write(&path, &good).unwrap();
            last = epoch;
        }
    }
}
