//! Resources of the host for this process: memory under the limits of its control groups, and ports.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory that this process may use, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// All of it: the host's memory, or the least limit of the process's control groups.
    pub total: u64,
    /// The part that is free, or that the kernel can free by dropping clean pages of files.
    pub available: u64,
    /// File with the limit in force, if it is not the host's memory.
    pub limit: Option<PathBuf>,
}

/// Reads the memory of the host under `root` (`/`), and the limits of this process's control groups of version 1
/// and 2. Returns `None` if `/proc` cannot be read.
pub fn memory(root: &Path) -> Option<Memory> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib = |name: &str| {
        text.lines().find_map(|line| {
            line.strip_prefix(name)?
                .strip_prefix(':')?
                .trim()
                .split(' ')
                .next()?
                .parse::<u64>()
                .ok()
        })
    };
    let host = Memory {
        total: kib("MemTotal")? << 10,
        available: kib("MemAvailable")? << 10,
        limit: None,
    };
    Some(groups(root).iter().filter_map(|folder| limit_of(folder)).fold(host, |least, group| {
        let available = least.available.min(group.available);
        let tighter = if group.total < least.total { group } else { least };
        Memory { available, ..tighter }
    }))
}

/// Folders of this process's control groups, with their parents.
fn groups(root: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut folders = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let mount = match controllers {
            "" => root.join("sys/fs/cgroup"),
            list if list.split(',').any(|name| name == "memory") => {
                root.join("sys/fs/cgroup/memory")
            }
            _ => continue,
        };
        // In a container the path can be the host's, which does not exist there. The mount is then its group.
        let own = mount.join(path.trim_start_matches('/'));
        folders.extend(
            own.ancestors().take_while(|folder| folder.starts_with(&mount)).map(Path::to_owned),
        );
    }
    folders
}

/// Limit of one control group, if it has one.
fn limit_of(folder: &Path) -> Option<Memory> {
    let number = |name: &str| {
        fs::read_to_string(folder.join(name)).ok().and_then(|text| text.trim().parse::<u64>().ok())
    };
    let (file, used, cache) = match number("memory.max") {
        Some(_) => ("memory.max", "memory.current", "inactive_file"),
        None => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    };
    // Version 1 writes a limit near 2^63 for none.
    let total = number(file).filter(|total| *total < 1 << 62)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat
        .lines()
        .find_map(|line| line.strip_prefix(cache)?.strip_prefix(' ')?.parse::<u64>().ok())
        .unwrap_or(0);
    let used = number(used)?.saturating_sub(reclaimable);
    let limit = Some(folder.join(file));
    Some(Memory { total, available: total.saturating_sub(used), limit })
}

/// Processes that listen on TCP port `port`: name and PID of each. Other users' processes are not visible
/// without privileges; the list can be empty.
pub fn listeners(port: u16) -> Vec<String> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|table| listening_inodes(&table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let mut found = Vec::new();
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        let holds = files.flatten().any(|file| {
            fs::read_link(file.path())
                .is_ok_and(|target| inodes.iter().any(|inode| target.as_os_str() == inode.as_str()))
        });
        if holds {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.push(format!("{} (PID {pid})", name.trim().escape_debug()));
        }
    }
    found
}

/// Inodes of the sockets that listen on `port`, from the kernel's table of TCP sockets.
fn listening_inodes(table: &str, port: u16) -> Vec<u64> {
    const LISTENING: &str = "0A";
    let rows = table.lines().skip(1).filter_map(|row| {
        let fields: Vec<&str> = row.split_whitespace().collect();
        let (_, local) = fields.get(1)?.rsplit_once(':')?;
        let matches =
            u16::from_str_radix(local, 16) == Ok(port) && fields.get(3) == Some(&LISTENING);
        if matches { fields.get(9)?.parse().ok() } else { None }
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    const MEMINFO: &str =
        "MemTotal:       24000000 kB\nMemFree:  1 kB\nMemAvailable:   20000000 kB\n";

    #[test]
    fn a_control_group_limits_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write(root, "proc/meminfo", MEMINFO);
        let host = Memory { total: 24_000_000 << 10, available: 20_000_000 << 10, limit: None };
        assert_eq!(memory(root), Some(host.clone()));

        // Version 2: the parent's limit holds for the child, less what is used and cannot be freed.
        write(root, "proc/self/cgroup", "0::/pods/a\n");
        write(root, "sys/fs/cgroup/pods/a/memory.max", "max\n");
        write(root, "sys/fs/cgroup/pods/a/memory.current", "100\n");
        assert_eq!(memory(root), Some(host));
        write(root, "sys/fs/cgroup/pods/memory.max", "268435456\n");
        write(root, "sys/fs/cgroup/pods/memory.current", "200000000\n");
        write(root, "sys/fs/cgroup/pods/memory.stat", "anon 1\ninactive_file 150000000\n");
        let pods = root.join("sys/fs/cgroup/pods/memory.max");
        let expected = Memory { total: 268_435_456, available: 218_435_456, limit: Some(pods) };
        assert_eq!(memory(root), Some(expected));

        // Version 1, with the path of the host in a container.
        write(root, "proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n");
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n");
        write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1500000\n");
        write(root, "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 700000\n");
        let found = memory(root).unwrap();
        assert_eq!((found.total, found.available), (1_000_000, 200_000));
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(memory(root).unwrap().limit, None);
    }

    #[test]
    fn the_process_behind_a_port_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let found = listeners(listener.local_addr().unwrap().port());
        let pid = format!("(PID {})", std::process::id());
        assert!(found.iter().any(|name| name.ends_with(&pid)), "{found:?}");
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1\n   1: 0100007F:1F90 0100007F:9999 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1\n";
        assert_eq!(listening_inodes(table, 8080), [4711]);
        assert!(listening_inodes(table, 8081).is_empty());
        assert!(listening_inodes("", 8080).is_empty());
    }
}
