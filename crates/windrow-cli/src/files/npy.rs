//! NumPy's `.npy` format, versions 1 to 3.
//!
//! <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>

use super::literal::{self, Value};
use super::{Reason, escaped, row_major};
use std::io::{Read, Write};
use windrow::{DType, Layout, Tensor, TensorDesc};

pub(super) const MAGIC: [u8; 6] = *b"\x93NUMPY";
const TYPES: [(&str, DType); 5] = [
    ("f4", DType::F32),
    ("f2", DType::F16),
    ("f8", DType::F64),
    ("i4", DType::I32),
    ("i8", DType::I64),
];

/// Other names of these in NumPy.
const NAMES: [(&str, DType); 14] = [
    ("float32", DType::F32),
    ("single", DType::F32),
    ("f", DType::F32),
    ("float16", DType::F16),
    ("half", DType::F16),
    ("e", DType::F16),
    ("float64", DType::F64),
    ("double", DType::F64),
    ("float", DType::F64),
    ("d", DType::F64),
    ("int32", DType::I32),
    ("i", DType::I32),
    ("int64", DType::I64),
    ("q", DType::I64),
];

/// The longest header: a description of structures may be long, but those are no tensors.
const HEADER_LIMIT: u64 = 1 << 20;

/// Reads an array from `reader`, which holds `len` bytes; `None` if that is not known.
pub(super) fn read(mut reader: impl Read, len: Option<u64>) -> Result<Tensor, Reason> {
    let mut start = [0; 8];
    read_header(&mut reader, &mut start)?;
    if !start.starts_with(&MAGIC) {
        return Err(format_error("it does not begin with \\x93NUMPY"));
    }
    let (length_bytes, version) = match start[6] {
        1 => (2, 1),
        v @ (2 | 3) => (4, v),
        v => return Err(format_error(format!("format version {v}, expected 1, 2 or 3"))),
    };
    let mut size = [0; 4];
    read_header(&mut reader, &mut size[..length_bytes])?;
    let size = u64::from(u32::from_le_bytes(size));
    let before = 8 + length_bytes as u64;
    if size > len.unwrap_or(u64::MAX).saturating_sub(before).min(HEADER_LIMIT) {
        let file = len.map(|len| format!(" in a file of {len}")).unwrap_or_default();
        return Err(format_error(format!("a header of {size} bytes{file}")));
    }
    let mut text = vec![0; size as usize];
    read_header(&mut reader, &mut text)?;
    let text = match version {
        // Latin-1.
        1 | 2 => text.into_iter().map(char::from).collect(),
        _ => String::from_utf8(text)
            .map_err(|_| format_error(format!("the version {version} header is not text")))?,
    };
    let header = Header::parse(&text)?;

    let desc = header.desc()?;
    let truncated = |given| Reason::Truncated {
        shape: desc.shape().to_vec(),
        dtype: desc.dtype,
        expected: desc.bytes(),
        given,
    };
    // Before any memory is asked for: a damaged shape may be huge.
    if let Some(given) = len.map(|len| len.saturating_sub(before + size))
        && given < desc.bytes() as u64
    {
        return Err(truncated(given));
    }
    let mut tensor = Tensor::uninitialised(desc)?;
    // The memory of a tensor is the system's until it is written: what a pipe only claims costs none.
    let given = fill(&mut reader, tensor.as_bytes_mut())?;
    if given < desc.bytes() {
        return Err(truncated(given as u64));
    }
    if header.big_endian != cfg!(target_endian = "big") {
        tensor.as_bytes_mut().chunks_exact_mut(desc.dtype.size()).for_each(<[u8]>::reverse);
    }
    Ok(tensor)
}

/// Reads until `to` is full or nothing is left; returns the number of bytes.
fn fill(reader: &mut impl Read, to: &mut [u8]) -> std::io::Result<usize> {
    let mut len = 0;
    while len < to.len() {
        match reader.read(&mut to[len..]) {
            Ok(0) => break,
            Ok(count) => len += count,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(len)
}

/// Writes a tensor in row-major order, little-endian.
pub(super) fn write(file: &mut dyn Write, tensor: &Tensor) -> Result<(), Reason> {
    let TensorDesc { dtype, .. } = tensor.desc();
    let name = TYPES.iter().find(|(_, d)| d == dtype).map(|(n, _)| n).ok_or_else(|| {
        Reason::ElementType { given: dtype.name().into(), expected: "a type that NumPy has" }
    })?;
    let shape = match tensor.shape() {
        [n] => format!("({n},)"),
        sizes => format!("({})", sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    };
    let mut header = format!("{{'descr': '<{name}', 'fortran_order': False, 'shape': {shape}, }}");
    // Data begin at a multiple of 64, after 10 bytes, the header and a line feed.
    let padding = (10 + header.len() + 1).next_multiple_of(64) - (10 + header.len() + 1);
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    file.write_all(&MAGIC)?;
    file.write_all(&[1, 0])?;
    file.write_all(&(header.len() as u16).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    Ok(row_major::write(file, tensor)?)
}

struct Header {
    dtype: DType,
    big_endian: bool,
    fortran_order: bool,
    shape: Vec<usize>,
}

impl Header {
    /// Reads `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`, in every way of writing that NumPy reads.
    fn parse(text: &str) -> Result<Self, Reason> {
        let entries = literal::dictionary(text)
            .ok_or_else(|| format_error("the header is no dictionary of Python"))?;
        // Of a key that is there twice the last counts, as in Python.
        let value = |key: &str| {
            let found = entries.iter().rev().find(|(name, _)| *name == key);
            found
                .map(|(_, value)| value)
                .ok_or_else(|| format_error(format!("no `{key}` in the header")))
        };

        let (dtype, big_endian) = match value("descr")? {
            Value::Text(descr) => element_type(descr)?,
            _ => element_type("a structure")?,
        };
        let fortran_order = match value("fortran_order")? {
            Value::Word("True") => true,
            Value::Word("False") => false,
            other => {
                let given = escaped(other.word());
                let detail = format!("`fortran_order` is `{given}`, expected True or False");
                return Err(format_error(detail));
            }
        };
        let shape = value("shape")?.sizes();
        let shape = shape.ok_or_else(|| format_error("`shape` is no tuple of sizes"))?;
        Ok(Header { dtype, big_endian, fortran_order, shape })
    }

    fn desc(&self) -> Result<TensorDesc, windrow::Error> {
        let mut order: Vec<usize> = (0..self.shape.len()).collect();
        if self.fortran_order {
            order.reverse();
        }
        Ok(TensorDesc::new(self.dtype, Layout::with_order(&self.shape, &order)?))
    }
}

/// The type that NumPy means by a name, and whether its bytes are big-endian.
fn element_type(descr: &str) -> Result<(DType, bool), Reason> {
    let native = cfg!(target_endian = "big");
    let (big_endian, code) = match descr.split_at_checked(1) {
        Some(("<", code)) => (false, code),
        Some((">", code)) => (true, code),
        Some(("=" | "|", code)) => (native, code),
        _ => (native, descr),
    };
    let by_code = TYPES.iter().find(|(name, _)| *name == code);
    // Names have no byte order, and letters have.
    let by_name =
        NAMES.iter().find(|(name, _)| *name == code && (name.len() == 1 || code == descr));
    by_code.or(by_name).map(|(_, dtype)| (*dtype, big_endian)).ok_or_else(|| Reason::ElementType {
        given: escaped(descr).into(),
        expected: "float32, float16, float64, int32 or int64 (bf16: use .safetensors)",
    })
}

fn read_header(reader: &mut impl Read, to: &mut [u8]) -> Result<(), Reason> {
    reader.read_exact(to).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => format_error("it ends inside the header"),
        _ => e.into(),
    })
}

fn format_error(detail: impl Into<String>) -> Reason {
    Reason::Format { format: ".npy", detail: detail.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Tensor, Reason> {
        read(bytes, Some(bytes.len() as u64))
    }

    fn message(bytes: &[u8]) -> String {
        parse(bytes).unwrap_err().to_string()
    }

    #[test]
    fn byte_order_and_fortran_order() {
        let data: Vec<u8> = (0..6i32).flat_map(i32::to_be_bytes).collect();
        let header = "{'descr': '>i4', 'fortran_order': True, 'shape': (2, 3), }\n";
        let t = parse(&file(header, &data)).unwrap();
        assert_eq!(t.desc().strides(), [1, 2]);
        assert_eq!(t.to_vec::<i32>().unwrap(), [0, 2, 4, 1, 3, 5]);
    }

    #[test]
    fn one_dimension_and_none() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }";
        assert_eq!(parse(&file(header, &1f32.to_le_bytes())).unwrap().shape(), [1]);
        let header = "{'shape': (), 'fortran_order': False, 'descr': '<f4'}";
        let empty: [usize; 0] = [];
        assert_eq!(parse(&file(header, &1f32.to_le_bytes())).unwrap().shape(), empty);
    }

    #[test]
    fn python_2_wrote_sizes_with_an_l() {
        let header = "{'descr': '<i4', 'fortran_order': False, 'shape': (2L, 3L), }";
        assert_eq!(parse(&file(header, &[0; 24])).unwrap().shape(), [2, 3]);
        let bad = "{'descr': '<i4', 'fortran_order': False, 'shape': (L, 3), }";
        assert!(message(&file(bad, &[0; 24])).contains("tuple of sizes"));
    }

    #[test]
    fn fortran_order_is_true_or_false() {
        for bad in ["banana", "Truely", "''", "1", "(True,)"] {
            let header = format!("{{'descr': '<f4', 'fortran_order': {bad}, 'shape': (1,), }}");
            let message = message(&file(&header, &[0; 4]));
            assert!(message.contains("expected True or False"), "{bad}: {message}");
        }
    }

    #[test]
    fn a_pipe_is_read_as_far_as_the_array_goes() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
        let whole = file(header, &[0; 8]);
        let mut endless = whole.chain(std::io::repeat(0));
        assert_eq!(read(&mut endless, None).unwrap().shape(), [2]);
        let cut = read(&whole[..whole.len() - 3], None).unwrap_err().to_string();
        assert!(cut.contains("needs 8 bytes, the file has 5"), "{cut}");
        let long = b"\x93NUMPY\x02\x00\xff\xff\xff\xff".chain(std::io::repeat(b' '));
        assert!(read(long, None).unwrap_err().to_string().contains("header of 4294967295"));
    }

    #[test]
    fn version_two() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }";
        let mut bytes = b"\x93NUMPY\x02\x00".to_vec();
        bytes.extend((header.len() as u32).to_le_bytes());
        bytes.extend(header.as_bytes());
        assert_eq!(parse(&bytes).unwrap().shape(), [0]);
    }

    #[test]
    fn headers_are_read_as_numpy_reads_them() {
        for header in [
            r#"{"descr": "<f4", "fortran_order": False, "shape": (2, 3)}"#,
            "{u'descr': u'<f4', u'fortran_order': False, u'shape': (2L, 3L)}",
            "{'shape':(2,3,),'fortran_order':False,'descr':'=f4',}   \n",
            " { 'descr' : 'float32' , 'shape' : ( 2 ,3 ) , 'fortran_order' : False }",
            "{'descr': '|f4', 'fortran_order': False, 'shape': (2, 3)}",
            "{'descr': 'f4', 'fortran_order': False, 'shape': (+2, 3)}",
            "{'descr': '<f', 'fortran_order': False, 'shape': (2, 3)}",
            "{'descr': 'single', 'fortran_order': False, 'shape': (2, 3)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (9,), 'shape': (2, 3)}",
            "{'descr': 'shape', 'descr': '<f4', 'fortran_order': False,\n'shape': (2,\t3)}",
        ] {
            let data: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
            let version_1 = file(header, &data);
            let wide = (header.len() as u32).to_le_bytes();
            let later = |version: u8| {
                let start = [&MAGIC[..], &[version, 0], &wide, header.as_bytes(), &data];
                start.concat()
            };
            for bytes in [version_1, later(2), later(3)] {
                let t = parse(&bytes).unwrap_or_else(|e| panic!("{header}: {e}"));
                assert_eq!(t.shape(), [2, 3], "{header}");
                assert_eq!(t.to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "{header}");
            }
        }
        for (name, dtype) in TYPES.iter().chain(&NAMES) {
            assert_eq!(element_type(name).unwrap(), (*dtype, cfg!(target_endian = "big")));
        }
        assert_eq!(element_type(">d").unwrap(), (DType::F64, true));
        assert!(element_type("<float32").is_err() && element_type("=").is_err());
    }

    #[test]
    fn headers_that_python_does_not_read_are_refused() {
        let deep = format!("{{'descr': {}", "(".repeat(30_000));
        let entry = "'descr': '<f4', 'fortran_order': False";
        for header in [
            "",
            "{",
            "{}x",
            "('descr', '<f4')",
            &deep,
            &format!("{{{entry}, 'shape': (2,)"),
            &format!("{{{entry}, 'shape': (2,)}}, 1"),
            &format!("{{{entry}, 'shape': (2 3)}}"),
            &format!("{{{entry} 'shape': (2,)}}"),
            &format!("{{{entry}, 'shape': (,)}}"),
            &format!("{{{entry}, 'shape': [2]}}"),
            &format!("{{{entry}, 'shape': (2)}}"),
            &format!("{{{entry}, 'shape': ('2',)}}"),
            &format!("{{{entry}, shape: (2,)}}"),
            &format!("{{{entry}, 'shape: (2,)}}"),
        ] {
            assert!(parse(&file(header, &[0; 8])).is_err(), "{header:.80}");
        }
    }

    #[test]
    fn damaged_files_are_named() {
        let header = |descr: &str, shape: &str| {
            format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")
        };
        let good = file(&header("'<f4'", "(2,)"), &[0; 8]);
        assert!(parse(&good).is_ok());
        for end in 0..good.len() {
            assert!(parse(&good[..end]).is_err(), "cut at {end}");
        }
        assert!(message(b"PK\x03\x04....").contains("NUMPY"));
        assert!(message(&good[..good.len() - 1]).contains("needs 8 bytes, the file has 7"));
        assert!(message(b"\x93NUMPY\x09\x00").contains("version 9"));
        assert!(message(b"\x93NUMPY\x02\x00\xff\xff\xff\xff").contains("header of 4294967295"));
        for (descr, shape, part) in [
            ("'<u2'", "(2,)", "element type <u2"),
            ("'<V2'", "(2,)", "bf16"),
            ("[('a', '<f4')]", "(2,)", "a structure"),
            ("''", "(2,)", "element type"),
            ("'<f4'", "(-2,)", "tuple of sizes"),
            ("'<f4'", "5", "tuple of sizes"),
            ("'<f4'", "(4611686018427387904, 4)", "overflows"),
            ("'<f4'", "(1099511627776,)", "truncated"),
            ("'<f4'", "(1, 1, 1, 1, 1, 1, 1, 1, 1)", "at most 8"),
        ] {
            let message = message(&file(&header(descr, shape), &[0; 8]));
            assert!(message.contains(part), "{descr} {shape}: {message}");
        }
        assert!(message(&file("{}", &[])).contains("descr"));
    }
}
