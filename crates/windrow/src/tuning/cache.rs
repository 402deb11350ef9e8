//! Search results on disk: one JSON file, the *table*, for each type of device.

use super::VERSION;
use super::device::DeviceModel;
use crate::{Device, Result, folder};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// The maximum size in bytes of a table that is read; a larger file is ignored. It is enough for a few hundred thousand
/// entries.
const TABLE_LIMIT: u64 = 64 << 20;

/// The timeout for the lock. Its holder only reads and writes one small file.
const PATIENCE: Duration = Duration::from_secs(5);

/// A table entry: the fastest configuration of a problem, its time, and the cost model's choice with its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) configuration: String,
    /// The median time of a call in milliseconds.
    pub(crate) ms: f64,
    /// The cost model's choice.
    pub(crate) model: String,
    /// The median time of a call of the cost model's choice in milliseconds, in the same search.
    pub(crate) model_ms: f64,
}

/// Entries by the key of the problem.
pub(crate) type Entries = BTreeMap<String, Entry>;

/// A table as a JSON file. Entries are parsed one by one, so a damaged entry does not affect the others.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    windrow: String,
    device: DeviceModel,
    entries: BTreeMap<String, serde_json::Value>,
}

/// The text of a table.
pub(crate) fn print(device: &DeviceModel, entries: &Entries) -> String {
    let value = |entry| serde_json::to_value(entry).expect("an entry has nothing that JSON lacks");
    let entries = entries.iter().map(|(key, entry)| (key.clone(), value(entry))).collect();
    let table = Table { windrow: VERSION.into(), device: device.clone(), entries };
    serde_json::to_string_pretty(&table).expect("a table has nothing that JSON lacks") + "\n"
}

/// The device and the entries of a table. An entry that cannot be parsed is skipped with a warning.
///
/// # Errors
/// A message that says why the text is not a table of this version.
pub(crate) fn parse(text: &str) -> Result<(DeviceModel, Entries), String> {
    let table: Table = serde_json::from_str(text).map_err(|e| e.to_string())?;
    if table.windrow != VERSION {
        return Err(format!("it is for windrow {}, this is {VERSION}", table.windrow));
    }
    Ok(table.parts())
}

impl Table {
    fn parts(self) -> (DeviceModel, Entries) {
        let mut entries = Entries::new();
        for (key, value) in self.entries {
            match serde_json::from_value::<Entry>(value) {
                Ok(entry) => drop(entries.insert(key, entry)),
                Err(error) => tracing::warn!(key, %error, "an entry of a tuning table is ignored"),
            }
        }
        (self.device, entries)
    }
}

/// The folder of the tables: `WINDROW_TUNE_CACHE` if set, otherwise `tuning` in the user's cache folder. `None` if
/// there is no such place, and in unit tests, which must not depend on what was tuned on the machine.
pub(crate) fn directory() -> Option<PathBuf> {
    folder::from_env("WINDROW_TUNE_CACHE")
        .or_else(|| folder::cache().filter(|_| !cfg!(test)).map(|d| d.join("tuning")))
}

/// The entries of a device's file; none if there is no such file. One that cannot be read or is for
/// another device is ignored with a warning.
pub(crate) fn load(directory: &Path, device: &DeviceModel) -> Entries {
    let path = directory.join(device.file_name());
    let warn = |reason: &dyn std::fmt::Display| {
        tracing::warn!(file = %path.display(), %reason, "a tuning table is ignored");
    };
    let read = folder::read(&path, TABLE_LIMIT);
    let text = match read.and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other)) {
        Ok(text) => text,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                warn(&error);
            }
            return Entries::new();
        }
    };
    match parse(&text) {
        Ok((found, entries)) if found == *device => return entries,
        Ok((found, _)) => warn(&format!("it is for {found:?}, this is {device:?}")),
        Err(reason) => warn(&reason),
    }
    Entries::new()
}

/// Adds entries to a device's file. Its entries for other problems are kept. The file is replaced atomically under a
/// lock, so other processes may read it and add to it at the same time. Returns all entries.
pub(crate) fn store(directory: &Path, device: &DeviceModel, new: &Entries) -> io::Result<Entries> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    std::fs::create_dir_all(directory)?;
    let path = directory.join(device.file_name());
    // The lock is on a separate file, because the table file is replaced and a lock belongs to the file that was
    // opened.
    let lock = path.with_extension("lock");
    let opened = folder::open_lock(&lock);
    let opened = opened.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", lock.display())));
    let lock = take(&lock, opened?)?;
    let mut entries = load(directory, device);
    entries.extend(new.iter().map(|(key, entry)| (key.clone(), entry.clone())));
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let partial = path.with_extension(format!("{}.{count}", std::process::id()));
    std::fs::write(&partial, print(device, &entries))
        .and_then(|()| std::fs::rename(&partial, &path))
        .inspect_err(|_| drop(std::fs::remove_file(&partial)))?;
    drop(lock);
    Ok(entries)
}

/// The file with an exclusive lock. Waits for the lock for at most [`PATIENCE`].
fn take(path: &Path, file: File) -> io::Result<File> {
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => {
                let held = format!("another process holds {}", path.display());
                return Err(io::Error::new(io::ErrorKind::TimedOut, held));
            }
        }
    }
}

/// The tuning entries for a device, as loaded in this process.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) device: DeviceModel,
    /// The entries that were found on this machine.
    user: RwLock<Entries>,
    /// The entries that ship with the library.
    shipped: Entries,
}

/// Tables that ship with the library: what `windrow tune --export` wrote, without entries that are the cost model's
/// choice.
const SHIPPED: &[&str] =
    &[include_str!("shipped/nvidia-h200.json"), include_str!("shipped/amd-epyc-avx512bf16.json")];

impl Known {
    /// The entries for a device. They are read from disk at the first call and then kept until the process ends.
    ///
    /// # Errors
    /// [`crate::Error::NoDevice`], [`crate::Error::Backend`].
    pub(crate) fn of(device: Device) -> Result<&'static Known> {
        static ALL: Mutex<Vec<(Device, &'static Known)>> = Mutex::new(Vec::new());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = all.iter().find(|(d, _)| *d == device) {
            return Ok(known);
        }
        let model = DeviceModel::of(device)?;
        let user = directory().map(|directory| load(&directory, &model)).unwrap_or_default();
        let shipped = SHIPPED
            .iter()
            // Shipped tables are used whatever version measured them, because they are reviewed for each release.
            .filter_map(|text| serde_json::from_str::<Table>(text).ok())
            .map(Table::parts)
            .filter(|(shipped, _)| shipped.is_like(&model))
            .flat_map(|(_, entries)| entries)
            .collect();
        let known = Known { device: model, user: RwLock::new(user), shipped };
        let known: &'static Known = Box::leak(Box::new(known));
        all.push((device, known));
        Ok(known)
    }

    /// All entries that were found on this machine.
    pub(crate) fn user(&self) -> Entries {
        self.user.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True if no look-up can succeed.
    pub(crate) fn is_empty(&self) -> bool {
        self.shipped.is_empty()
            && self.user.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// The configuration found on this machine.
    pub(crate) fn found(&self, key: &str) -> Option<String> {
        let user = self.user.read().unwrap_or_else(PoisonError::into_inner);
        user.get(key).map(|entry| entry.configuration.clone())
    }

    /// The configuration that ships with the library.
    pub(crate) fn shipped(&self, key: &str) -> Option<&str> {
        self.shipped.get(key).map(|entry| entry.configuration.as_str())
    }

    /// Saves entries in this process, and in the device's file if there is a folder for it.
    ///
    /// # Errors
    /// An I/O error if the table cannot be written. The entries are still saved in this process.
    pub(crate) fn remember(&self, new: Entries) -> io::Result<()> {
        let stored = directory().map(|directory| store(&directory, &self.device, &new)).transpose();
        let mut user = self.user.write().unwrap_or_else(PoisonError::into_inner);
        if let Ok(Some(all)) = &stored {
            *user = all.clone();
        }
        user.extend(new);
        stored.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("windrow-tuning-{name}-{}", std::process::id()))
    }

    fn device(name: &str) -> DeviceModel {
        let [architecture, features, driver] = ["x86_64", "avx2", ""].map(String::from);
        DeviceModel { name: name.into(), architecture, features, driver }
    }

    fn entry(configuration: &str) -> Entry {
        let model = "direct".into();
        Entry { configuration: configuration.into(), ms: 1.5, model, model_ms: 2.0 }
    }

    fn one(key: &str, configuration: &str) -> Entries {
        Entries::from([(key.into(), entry(configuration))])
    }

    #[test]
    fn entries_come_back_merged() {
        let (dir, cpu) = (scratch("merge"), device("cpu"));
        assert!(load(&dir, &cpu).is_empty());
        store(&dir, &cpu, &one("a", "direct")).unwrap();
        store(&dir, &cpu, &one("b", "direct tiles=3")).unwrap();
        let all = store(&dir, &cpu, &one("a", "im2col_gemm")).unwrap();
        assert_eq!(load(&dir, &cpu), all);
        assert_eq!((all["a"].configuration.as_str(), all.len()), ("im2col_gemm", 2));
        assert!(load(&dir, &device("another")).is_empty());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn damaged_and_foreign_files_are_ignored_and_replaced() {
        let (dir, cpu) = (scratch("damage"), device("cpu"));
        store(&dir, &cpu, &one("a", "direct")).unwrap();
        let path = dir.join(cpu.file_name());
        let whole = std::fs::read_to_string(&path).unwrap();
        let mut bad: Vec<String> = (0..whole.len() - 2).map(|n| whole[..n].into()).collect();
        bad.push(whole.replace("\"name\": \"cpu\"", "\"name\": \"other\""));
        bad.push(whole.replace(VERSION, "0.0.0"));
        bad.push(whole.replace("\"features\"", "\"more\": 1, \"features\""));
        for text in bad {
            std::fs::write(&path, &text).unwrap();
            assert!(load(&dir, &cpu).is_empty(), "{text}");
        }
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(load(&dir, &cpu).is_empty());
        assert_eq!(store(&dir, &cpu, &one("b", "direct")).unwrap().len(), 1);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// Something else may have the table's name (a pipe, a device, a folder). Reading it must not block, and a new
    /// table replaces it if possible.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_table_that_is_no_file_is_ignored() {
        let (dir, cpu) = (scratch("no-file"), device("cpu"));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join(cpu.file_name());
        let fifo = |path: &Path| {
            let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            // SAFETY: a string that ends in a zero.
            assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        };
        let replaced = |what: &str| {
            assert!(load(&dir, &cpu).is_empty(), "{what}");
            assert_eq!(store(&dir, &cpu, &one("a", "direct")).unwrap().len(), 1, "{what}");
            assert_eq!(load(&dir, &cpu).len(), 1, "{what}");
            std::fs::remove_file(&path).unwrap();
        };
        fifo(&path);
        replaced("a pipe");
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        replaced("a device");
        File::create(&path).unwrap().set_len(TABLE_LIMIT + 1).unwrap();
        replaced("a huge file");
        std::fs::create_dir(&path).unwrap();
        assert!(load(&dir, &cpu).is_empty());
        assert!(store(&dir, &cpu, &one("a", "direct")).is_err());
        std::fs::remove_dir(&path).unwrap();
        let lock = path.with_extension("lock");
        std::fs::remove_file(&lock).unwrap();
        fifo(&lock);
        let refused = store(&dir, &cpu, &one("a", "direct")).unwrap_err().to_string();
        assert!(refused.contains("lock: no regular file"), "{refused}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_damaged_entry_costs_no_other() {
        let cpu = device("cpu");
        let mut both = one("a", "direct");
        both.extend(one("b", "direct"));
        let text = print(&cpu, &both).replacen("\"ms\": 1.5", "\"ms\": \"fast\"", 1);
        let (found, entries) = parse(&text).unwrap();
        assert_eq!((found, entries.keys().next().unwrap().as_str()), (cpu, "b"));
    }

    #[test]
    fn threads_that_store_at_once_lose_nothing() {
        let (dir, cpu) = (scratch("threads"), device("cpu"));
        std::thread::scope(|s| {
            for thread in 0..4 {
                let (dir, cpu) = (&dir, &cpu);
                s.spawn(move || {
                    for i in 0..10 {
                        store(dir, cpu, &one(&format!("{thread}-{i}"), "direct")).unwrap();
                    }
                });
            }
            s.spawn(|| {
                // A half-written file would be ignored, so the table would look empty.
                let mut most = 0;
                for _ in 0..100 {
                    let now = load(&dir, &cpu).len();
                    assert!(now >= most);
                    most = now;
                }
            });
        });
        assert_eq!(load(&dir, &cpu).len(), 40);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2, "the table and its lock");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error_not_a_panic() {
        let file = scratch("file");
        std::fs::write(&file, b"").unwrap();
        assert!(store(&file, &device("cpu"), &one("a", "direct")).is_err());
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn shipped_tables_are_tables() {
        for text in SHIPPED {
            let table: Table = serde_json::from_str(text).unwrap();
            let version = table.windrow.clone();
            let (device, entries) = table.parts();
            assert!(!device.name.is_empty() && !entries.is_empty());
            assert_eq!(print(&device, &entries), text.replacen(&version, VERSION, 1));
        }
    }
}
